//! Which static keys are the driver's own.

use std::collections::BTreeMap;

use crate::credentials::{InvalidKeys, Keys};
use crate::secret::Secret;

/// The keys of the driver's mounted Secret. Only where there is no Secret, those of the environment, which charts of earlier drivers
/// set; never instead of a Secret that is incomplete or malformed.
pub fn choose(
    secret: &BTreeMap<String, Secret<String>>,
    environment: Option<&Keys>,
) -> Result<Option<Keys>, InvalidKeys> {
    if secret.is_empty() { Ok(environment.cloned()) } else { Keys::from_secret(secret).map(Some) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LACKS_KEY: &str = "the Secret lacks secret_access_key";
    const MALFORMED: &str = "the Secret has a malformed value for secret_access_key; it must be the plain key: printable ASCII \
                             without spaces";

    #[track_caller]
    fn check(secret: &[(&str, &str)], has_environment: bool, expected: Result<Option<&str>, &str>) {
        let secret = secret.iter().map(|(key, value)| ((*key).to_owned(), Secret::new((*value).to_owned()))).collect();
        let environment = has_environment.then(|| Keys::driver("environment", "e", None).unwrap());
        let chosen = choose(&secret, environment.as_ref()).map_err(|error| error.to_string());
        let id = chosen.as_ref().map(|it| it.as_ref().map(|keys| keys.access_key_id().expose().as_str()));
        assert_eq!(id.map_err(String::as_str), expected);
    }

    #[test]
    fn the_secret_wins_and_is_never_replaced_when_it_is_unusable() {
        let whole = [("access_key_id", "secret"), ("secret_access_key", "s\n")];
        let half = [("access_key_id", "secret")];
        let malformed = [("access_key_id", "secret"), ("secret_access_key", "s s")];
        check(&[], false, Ok(None));
        check(&[], true, Ok(Some("environment")));
        check(&whole, false, Ok(Some("secret")));
        check(&whole, true, Ok(Some("secret")));
        check(&half, false, Err(LACKS_KEY));
        check(&half, true, Err(LACKS_KEY));
        check(&malformed, false, Err(MALFORMED));
        check(&malformed, true, Err(MALFORMED));
    }
}
