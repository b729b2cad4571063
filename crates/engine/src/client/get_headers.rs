//! Attributes of objects from the headers of responses to GET, which the client library drops.

use std::collections::HashMap;

use parking_lot::Mutex;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc2822;

/// What HEAD would say of an object, as far as the file system uses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectSummary {
    pub size: u64,
    pub last_modified: OffsetDateTime,
    pub etag: String,
}

/// Headers of GETs whose sender asked for them, by key.
#[derive(Debug, Default)]
pub struct GetHeaders(Mutex<HashMap<String, Expected>>);

#[derive(Debug, Default)]
struct Expected {
    senders: usize,
    found: Option<ObjectSummary>,
}

/// Until it is dropped, the headers of GETs for its key are noted.
pub struct ExpectedHeaders<'a> {
    headers: &'a GetHeaders,
    key: String,
}

impl GetHeaders {
    pub fn expect(&self, key: &str) -> ExpectedHeaders<'_> {
        self.0.lock().entry(key.to_owned()).or_default().senders += 1;
        ExpectedHeaders { headers: self, key: key.to_owned() }
    }

    /// Other GETs must not pay for it.
    pub fn is_any_expected(&self) -> bool {
        !self.0.lock().is_empty()
    }

    pub fn note(&self, key: &str, attributes: &ObjectSummary) {
        if let Some(expected) = self.0.lock().get_mut(key) {
            expected.found = Some(attributes.clone());
        }
    }
}

impl ExpectedHeaders<'_> {
    /// What the last response said.
    pub fn found(&self) -> Option<ObjectSummary> {
        self.headers.0.lock().get(&self.key)?.found.clone()
    }
}

impl Drop for ExpectedHeaders<'_> {
    fn drop(&mut self) {
        let mut all = self.headers.0.lock();
        if let Some(expected) = all.get_mut(&self.key) {
            expected.senders -= 1;
            if expected.senders == 0 {
                all.remove(&self.key);
            }
        }
    }
}

impl ObjectSummary {
    /// From the headers of a response with a part of the object, by lower-case name. None if something is missing, or if the
    /// object may have to be restored before it is read: HEAD tells more.
    pub fn parse(header: impl Fn(&str) -> Option<String>) -> Option<Self> {
        // Some stores name the usual class, too.
        let has_other_class = header("x-amz-storage-class").is_some_and(|it| it != "STANDARD");
        if has_other_class || header("x-amz-restore").is_some() {
            return None;
        }
        // A store may send the whole object, without a range, if the range contains it.
        let size = match header("content-range") {
            Some(range) => range.rsplit_once('/')?.1.parse().ok()?,
            None => header("content-length")?.parse().ok()?,
        };
        Some(Self {
            size,
            last_modified: OffsetDateTime::parse(&header("last-modified")?, &Rfc2822).ok()?,
            etag: header("etag")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attributes(etag: &str) -> ObjectSummary {
        ObjectSummary { size: 3, last_modified: OffsetDateTime::UNIX_EPOCH, etag: etag.into() }
    }

    #[test]
    fn only_headers_that_are_expected_are_kept() {
        let headers = GetHeaders::default();
        headers.note("a", &attributes("1"));
        assert!(!headers.is_any_expected());
        let (first, second) = (headers.expect("a"), headers.expect("a"));
        assert_eq!(first.found(), None);
        headers.note("a", &attributes("2"));
        headers.note("b", &attributes("3"));
        assert_eq!((first.found(), headers.expect("b").found()), (Some(attributes("2")), None));
        drop(first);
        assert_eq!(second.found(), Some(attributes("2")));
        drop(second);
        assert!(!headers.is_any_expected());
    }

    fn parse(headers: &[(&str, &str)]) -> Option<ObjectSummary> {
        let usual =
            [("content-range", "bytes 0-2/3"), ("last-modified", "Thu, 01 Jan 1970 00:00:00 GMT"), ("etag", "\"1\"")];
        ObjectSummary::parse(|name| {
            let all = headers.iter().chain(&usual);
            all.clone().find(|it| it.0 == name).map(|it| it.1.to_owned()).filter(|it| !it.is_empty())
        })
    }

    #[test]
    fn attributes_are_complete_or_there_are_none() {
        assert_eq!(parse(&[]), Some(attributes("\"1\"")));
        for missing in ["content-range", "last-modified", "etag"] {
            assert_eq!(parse(&[(missing, "")]), None, "{missing}");
        }
        assert_eq!(parse(&[("content-range", ""), ("content-length", "3")]), Some(attributes("\"1\"")));
        assert_eq!(parse(&[("content-range", "bytes 0-2/*")]), None);
        assert_eq!(parse(&[("last-modified", "yesterday")]), None);
        assert_eq!(parse(&[("x-amz-storage-class", "STANDARD")]), Some(attributes("\"1\"")));
        assert_eq!(parse(&[("x-amz-storage-class", "GLACIER")]), None);
        assert_eq!(parse(&[("x-amz-restore", "ongoing-request=\"true\"")]), None);
    }
}
