//! Keys of an issuer, renewed before they expire.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use s3csi_core::chain::Chain;
use tokio::sync::Mutex;

use super::issuer::TemporaryKeys;

/// Keys are renewed when a quarter of their lifetime is left, but not earlier than this before they expire. The shortest lifetime is
/// 15 minutes, so kubelet calls at least twice before the old keys expire.
const LONGEST_MARGIN: Duration = Duration::from_mins(15);

/// Many Pods may start at once: after a failure the issuer is left alone for as long.
pub const FAILURE_PAUSE: Duration = Duration::from_secs(5);

/// What was issued last for one holder, and the last failure since.
#[derive(Debug)]
pub struct IssuedKeys<E>(Mutex<Issued<E>>);

#[derive(Debug)]
struct Issued<E> {
    keys: Option<TemporaryKeys>,
    failure: Option<(Instant, Arc<E>)>,
}

impl<E> Default for IssuedKeys<E> {
    fn default() -> Self {
        Self(Mutex::new(Issued { keys: None, failure: None }))
    }
}

impl<E: Error + Send + Sync + 'static> IssuedKeys<E> {
    /// The issued keys, renewed by `ask` if it is time. Keys that have not expired outlive an issuer that is away or refuses.
    pub async fn current(
        &self,
        holder: &str,
        ask: impl Future<Output = Result<TemporaryKeys, E>> + Send,
    ) -> Result<TemporaryKeys, Arc<E>> {
        let mut state = self.0.lock().await;
        let now = SystemTime::now();
        if let Some(keys) = state.keys.as_ref().filter(|it| now < it.renewal()) {
            return Ok(keys.clone());
        }
        let recent = state.failure.as_ref().filter(|(at, _)| at.elapsed() < FAILURE_PAUSE).map(|(_, it)| it.clone());
        let cause = match recent {
            Some(cause) => cause,
            None => match ask.await {
                Ok(keys) => {
                    *state = Issued { keys: Some(keys.clone()), failure: None };
                    return Ok(keys);
                }
                Err(error) => {
                    let cause = Arc::new(error);
                    tracing::warn!(holder, error = %Chain(&cause), "temporary credentials were not renewed");
                    state.failure = Some((Instant::now(), cause.clone()));
                    cause
                }
            },
        };
        state.keys.clone().filter(|it| now < it.expires).ok_or(cause)
    }

    /// When the present keys expire.
    pub async fn expiry(&self) -> Option<SystemTime> {
        self.0.lock().await.keys.as_ref().map(|it| it.expires)
    }

    /// Whether there are keys that have not expired, or somebody asks for some now.
    pub fn is_needed(&self) -> bool {
        self.0.try_lock().map_or(true, |it| it.keys.as_ref().is_some_and(|it| SystemTime::now() < it.expires))
    }
}

impl TemporaryKeys {
    /// When to ask for the next keys.
    pub fn renewal(&self) -> SystemTime {
        let lifetime = self.expires.duration_since(self.issued).unwrap_or_default();
        self.expires - (lifetime / 4).min(LONGEST_MARGIN)
    }
}

#[cfg(test)]
mod tests {
    use s3csi_core::credentials::Keys;

    use super::*;

    fn keys(id: &str, age_seconds: u64, lifetime_seconds: u64) -> TemporaryKeys {
        let issued = SystemTime::now() - Duration::from_secs(age_seconds);
        let expires = issued + Duration::from_secs(lifetime_seconds);
        TemporaryKeys { keys: Keys::driver(id, "b", None).unwrap(), issued, expires }
    }

    #[derive(Debug, thiserror::Error)]
    #[error("away")]
    struct Away;

    #[test]
    fn keys_are_renewed_in_time() {
        let check = |lifetime: u64, margin: u64| {
            let keys = keys("a", 0, lifetime);
            assert_eq!(keys.expires.duration_since(keys.renewal()).unwrap(), Duration::from_secs(margin));
        };
        check(900, 225);
        check(3600, 900);
        check(43200, 900);
    }

    #[tokio::test]
    async fn keys_outlive_their_issuer_until_they_expire() {
        let id = |it: Result<TemporaryKeys, Arc<Away>>| it.map(|it| it.keys.access_key_id().expose().clone()).ok();
        let issued = IssuedKeys::<Away>::default();
        assert_eq!(id(issued.current("x", async { Err(Away) }).await), None);
        let issued = IssuedKeys::<Away>::default();
        let first = id(issued.current("x", async { Ok(keys("first", 0, 900)) }).await);
        assert_eq!(first.as_deref(), Some("first"));
        assert_eq!(id(issued.current("x", async { panic!("it is not time") }).await), first);
        assert!(issued.is_needed());

        let late = IssuedKeys::<Away>::default();
        assert!(late.current("x", async { Ok(keys("late", 800, 900)) }).await.is_ok());
        assert_eq!(id(late.current("x", async { Err(Away) }).await).as_deref(), Some("late"));
        let unpaused = id(late.current("x", async { panic!("the issuer is left alone after a failure") }).await);
        assert_eq!(unpaused.as_deref(), Some("late"));

        let expired = IssuedKeys::<Away>::default();
        assert!(expired.current("x", async { Ok(keys("expired", 901, 900)) }).await.is_ok());
        assert!(!expired.is_needed());
        assert_eq!(id(expired.current("x", async { Err(Away) }).await), None);
    }
}
