//! One question to the server before anything is mounted, and an explanation in plain words if it does not help.
//!
//! The S3 client library is stubborn on purpose (a file system must not fail on a hiccup): it retries a refused connection
//! for a minute and an untrusted certificate for four. At start the caller waits for the answer, so here it is bounded.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use futures::executor::block_on;
use mountpoint_s3_client::error::{ListObjectsError, ObjectClientError};
use mountpoint_s3_client::error_metadata::ProvideErrorMetadata;
use mountpoint_s3_client::{ObjectClient, S3CrtClient, S3RequestError};
use mountpoint_s3_fs::s3::S3Path;

use s3csi_core::FailureCode;
use s3csi_core::text::shortened;

use crate::client::Lister;
use crate::logging::crt::{ConnectionErrors, ConnectionProblem};

/// A server that is just being restarted is back by then.
const CONNECTION_PATIENCE: Duration = Duration::from_secs(5);
/// Background mode gives up after thirty seconds; our explanation must come before.
const PATIENCE: Duration = Duration::from_secs(25);
/// How much of the store's answer is repeated; those of AWS are shorter.
const MAX_WORDS_BYTES: usize = 200;
/// How often we look whether the library complained.
const GLANCE: Duration = Duration::from_millis(50);

#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error("bucket {bucket:?} does not exist at {server}; check its name, or create it")]
    NoBucket { bucket: String, server: String },

    #[error("{server} does not know the access key ({words}); check AWS_ACCESS_KEY_ID or the profile")]
    UnknownKey { server: String, words: String },

    #[error(
        "{server} says that the secret key does not match the access key ({words}); check AWS_SECRET_ACCESS_KEY or the profile"
    )]
    WrongSecret { server: String, words: String },

    #[error("{server} does not accept the session token ({words}); renew the temporary credentials")]
    InvalidSession { server: String, words: String },

    #[error(
        "the credentials have no permission to list bucket {bucket:?} at {server} ({words}); ask its owner for s3:ListBucket, s3:GetObject and s3:PutObject"
    )]
    NoPermission { bucket: String, server: String, words: String },

    #[error(
        "no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, use --profile, or --no-sign-request for a public bucket"
    )]
    NoCredentials,

    #[error("bucket {bucket:?} is in region {region}; use --region {region}")]
    OtherRegion { bucket: String, region: String },

    #[error(
        "the certificate of {server} is not trusted ({words}); name its CA certificate with --ca-bundle FILE or AWS_CA_BUNDLE"
    )]
    Certificate { server: String, words: String },

    #[error("{server} cannot be reached ({words}); check the address and the network")]
    Unreachable { server: String, words: String },

    #[error("{server} did not answer within {} seconds; check the address and the server", PATIENCE.as_secs())]
    Silent { server: String },

    #[error(
        "{server} answered with something that is no S3 listing of bucket {bucket:?}; check that the endpoint is an S3 server"
    )]
    Unreadable { bucket: String, server: String },

    #[error("{server} refused to list bucket {bucket:?} ({words})")]
    Refused { bucket: String, server: String, words: String },
}

impl ProbeError {
    pub fn code(&self) -> FailureCode {
        match self {
            Self::NoBucket { .. } => FailureCode::NoSuchBucket,
            Self::UnknownKey { .. } | Self::WrongSecret { .. } | Self::InvalidSession { .. } => FailureCode::UnknownKey,
            Self::NoPermission { .. } => FailureCode::Forbidden,
            Self::NoCredentials => FailureCode::NoCredentials,
            Self::Certificate { .. } => FailureCode::Certificate,
            Self::Unreachable { .. } | Self::Silent { .. } => FailureCode::Unreachable,
            Self::Unreadable { .. } => FailureCode::InvalidResponse,
            Self::OtherRegion { .. } | Self::Refused { .. } => FailureCode::Other,
        }
    }
}

/// Lists at most one name. The library does it, since its errors tell more; `lister`, which serves the mount, reads listings that the
/// library does not.
pub fn check(
    client: &S3CrtClient,
    path: &S3Path,
    server: &str,
    connection_errors: &ConnectionErrors,
    lister: Lister,
) -> Result<(), ProbeError> {
    let problems = connection_errors.listen();
    let (sender, answered) = channel();
    let (asking, bucket, prefix) = (client.clone(), path.bucket.to_string(), path.prefix.to_string());
    // One name and not none: some servers answer "none" for a bucket that does not exist.
    thread::spawn(move || {
        let found = block_on(asking.list_objects(&bucket, None, "/", 1, &prefix)).map(drop);
        sender.send(found.or_else(|error| match error {
            ObjectClientError::ClientError(S3RequestError::InternalError(_)) => {
                block_on(lister.list(None, "/", 1, &prefix)).map(drop).map_err(|_| error)
            }
            error => Err(error),
        }))
    });

    let started = Instant::now();
    let mut last_words = None;
    let outcome = loop {
        match answered.recv_timeout(GLANCE) {
            Ok(answer) => break answer.map_err(|error| explain(&error, path, server)),
            Err(RecvTimeoutError::Disconnected) => break Err(ProbeError::Silent { server: server.to_owned() }),
            Err(RecvTimeoutError::Timeout) => {}
        }
        match problems.try_iter().last() {
            Some(ConnectionProblem::Tls(words)) => {
                break Err(ProbeError::Certificate { server: server.to_owned(), words });
            }
            Some(ConnectionProblem::Connection(words)) => last_words = Some(words),
            None => {}
        }
        match &last_words {
            Some(words) if CONNECTION_PATIENCE < started.elapsed() => break Err(unreachable(server, words)),
            None if PATIENCE < started.elapsed() => break Err(ProbeError::Silent { server: server.to_owned() }),
            _ => {}
        }
    };
    connection_errors.stop();
    outcome
}

type ListError = ObjectClientError<ListObjectsError, S3RequestError>;

fn explain(error: &ListError, path: &S3Path, server: &str) -> ProbeError {
    let (bucket, server) = (path.bucket.to_string(), server.to_owned());
    let error = match error {
        ObjectClientError::ServiceError(ListObjectsError::NoSuchBucket) => {
            return ProbeError::NoBucket { bucket, server };
        }
        ObjectClientError::ServiceError(other) => {
            return ProbeError::Refused { bucket, server, words: other.to_string() };
        }
        ObjectClientError::ClientError(error) => error,
    };
    match error {
        S3RequestError::Forbidden(words, details) => {
            let code = details.error_code.as_deref().unwrap_or(words);
            forbidden(bucket, server, code, details.error_message.as_deref())
        }
        S3RequestError::NoSigningCredentials => ProbeError::NoCredentials,
        S3RequestError::IncorrectRegion(region, _) => ProbeError::OtherRegion { bucket, region: region.clone() },
        S3RequestError::InternalError(cause) => {
            // The words are a dump of what the store sent.
            tracing::debug!(%cause, "the answer cannot be read");
            ProbeError::Unreadable { bucket, server }
        }
        S3RequestError::CrtError(cause) => unreachable(&server, &cause.to_string()),
        other => {
            let details = other.meta();
            let words = match (details.http_code, details.error_code) {
                (Some(404), _) => return ProbeError::NoBucket { bucket, server },
                (Some(status), Some(code)) => {
                    format!("HTTP {status}, {}", words_of_store(&code, details.error_message.as_deref()))
                }
                (Some(status), None) => format!("HTTP {status}"),
                (None, _) => causes(other),
            };
            ProbeError::Refused { bucket, server, words }
        }
    }
}

fn forbidden(bucket: String, server: String, code: &str, message: Option<&str>) -> ProbeError {
    let words = words_of_store(code, message);
    match code {
        "InvalidAccessKeyId" | "NotSignedUp" | "InvalidClientTokenId" => ProbeError::UnknownKey { server, words },
        "SignatureDoesNotMatch" => ProbeError::WrongSecret { server, words },
        "ExpiredToken" | "InvalidToken" | "TokenRefreshRequired" => ProbeError::InvalidSession { server, words },
        _ => ProbeError::NoPermission { bucket, server, words },
    }
}

/// Code and message of the store's answer. Operators search for its words, and the store is not trusted to be brief.
fn words_of_store(code: &str, message: Option<&str>) -> String {
    let code = shortened(code, MAX_WORDS_BYTES);
    match message.map(|it| shortened(it, MAX_WORDS_BYTES)) {
        Some(message) if !message.is_empty() && message != code => format!("{code}: {message}"),
        Some(_) | None => code,
    }
}

fn unreachable(server: &str, words: &str) -> ProbeError {
    ProbeError::Unreachable { server: server.to_owned(), words: plain(words) }
}

/// `CRT error 1059: aws-c-io: AWS_IO_DNS_INVALID_NAME, Host name was invalid.` without what only the library's authors need.
fn plain(words: &str) -> String {
    let words = match words.split_once(", ") {
        Some((number_and_name, words)) if number_and_name.contains("AWS_") => words,
        _ => words,
    };
    words.trim_end_matches('.').to_owned()
}

fn causes(error: &S3RequestError) -> String {
    let mut words = error.to_string();
    let mut next = std::error::Error::source(error);
    while let Some(cause) = next {
        words.push_str(": ");
        words.push_str(&cause.to_string());
        next = cause.source();
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(code: &str, expected: &str) {
        let message = forbidden("logs".into(), "http://store".into(), code, Some("Words of the store")).to_string();
        let answer = format!("({code}: Words of the store)");
        assert!(message.contains(expected) && message.contains(&answer), "{message}");
    }

    #[test]
    fn the_words_of_the_store_are_bounded() {
        assert_eq!(words_of_store("AccessDenied", None), "AccessDenied");
        assert_eq!(words_of_store("AccessDenied", Some("")), "AccessDenied");
        assert_eq!(words_of_store("AccessDenied", Some("Access\nDenied\u{7}")), "AccessDenied: Access; Denied");
        let words = words_of_store("AccessDenied", Some(&"x".repeat(10_000)));
        assert!(words.len() < 250 && words.ends_with('…'), "{words}");
    }

    #[test]
    fn the_words_of_the_library_are_made_plain() {
        let words = "CRT error 1059: aws-c-io: AWS_IO_DNS_INVALID_NAME, Host name was invalid for dns resolution.";
        assert_eq!(plain(words), "Host name was invalid for dns resolution");
        assert_eq!(plain("socket connection refused."), "socket connection refused");
        assert_eq!(plain("first, second"), "first, second");
    }

    #[test]
    fn a_refusal_says_which_part_of_the_credentials_is_wrong() {
        check("InvalidAccessKeyId", "does not know the access key");
        check("SignatureDoesNotMatch", "the secret key does not match");
        check("ExpiredToken", "does not accept the session token");
        check("AccessDenied", "no permission to list bucket \"logs\"");
        check("AllAccessDisabled", "no permission to list");
    }
}
