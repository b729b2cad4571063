//! Sessions: temporary keys that act as an account, with a token that every request must carry, until they expire or are revoked.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

use s3s::{S3Result, s3_error};

use crate::data::Data;
use crate::store::Account;

/// Adds and revokes sessions of a running server.
#[derive(Clone)]
pub struct Sessions(pub(crate) Arc<RwLock<Data>>);

pub(crate) struct StoredSession {
    /// The access key of the account that the session acts as.
    pub account: String,
    pub token: String,
    pub expires: SystemTime,
}

impl Sessions {
    /// From now on `keys` act as `account`, if their requests carry `token`.
    pub fn add(&self, account: &Account, keys: &Account, token: &str, expires: SystemTime) {
        let mut data = self.0.write().unwrap_or_else(PoisonError::into_inner);
        data.accounts.insert(keys.access_key.clone(), keys.secret_key.clone());
        let session = StoredSession { account: account.access_key.clone(), token: token.to_owned(), expires };
        data.sessions.insert(keys.access_key.clone(), session);
    }

    /// Ends all sessions; their requests are answered with 403.
    pub fn revoke_all(&self) {
        let mut data = self.0.write().unwrap_or_else(PoisonError::into_inner);
        for access_key in std::mem::take(&mut data.sessions).into_keys() {
            data.accounts.remove(&access_key);
        }
    }
}

impl Data {
    /// The account that these keys act as.
    pub fn account_of<'a>(&'a self, access_key: &'a str) -> &'a str {
        self.sessions.get(access_key).map_or(access_key, |it| &it.account)
    }

    /// The account that acts. Fails for a session without its token, or that has expired.
    pub fn acting_account<'a>(&'a self, access_key: &'a str, token: Option<&str>) -> S3Result<&'a str> {
        let Some(session) = self.sessions.get(access_key) else {
            return Ok(access_key);
        };
        if token != Some(session.token.as_str()) {
            return Err(s3_error!(InvalidToken, "The provided token is malformed or otherwise invalid."));
        }
        if session.expires <= SystemTime::now() {
            return Err(s3_error!(ExpiredToken, "The provided token has expired."));
        }
        Ok(&session.account)
    }
}
