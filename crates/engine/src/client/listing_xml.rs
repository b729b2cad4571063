//! Parses a page of a listing. Only what the file system needs is read. Some stores list objects without an `ETag`; versitygw does so
//! for files that were there before it.
//!
//! The text comes from the store, so nothing in it is trusted: it is read once, from beginning to end, without recursion.

use std::borrow::Cow;

use mountpoint_s3_client::types::{ListObjectsResult, RestoreStatus};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::values::{self, ListedObject};

/// Stands for the `ETag` of an object that the store lists without one. No object has it, so a request that relies on it is refused.
pub const NO_ETAG: &str = "\"\"";

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListingError {
    #[error("the listing is not XML as S3 sends it: {problem}")]
    Malformed { problem: &'static str },

    #[error("the listing has an entry without {field}")]
    Missing { field: &'static str },

    #[error("the listing has an invalid {field}: {value:?}")]
    Invalid { field: &'static str, value: String },
}

/// A page of a listing (`ListObjectsV2`).
pub fn parse(text: &str) -> Result<ListObjectsResult, ListingError> {
    let mut listing = values::nothing_listed();
    let mut is_truncated = None;
    let mut token = None;
    for (name, content) in Children::of_root(text)? {
        match name {
            "Contents" => listing.objects.push(values::object_info(object(content?)?)),
            "CommonPrefixes" => {
                let prefix = child(content?, "Prefix")?.ok_or(ListingError::Missing { field: "Prefix" })?;
                listing.common_prefixes.push(prefix);
            }
            "IsTruncated" => is_truncated = Some(plain(content?)?),
            "NextContinuationToken" => token = Some(plain(content?)?),
            _ => {
                content?;
            }
        }
    }
    let is_truncated = match is_truncated.as_deref() {
        Some("true") => true,
        Some("false") => false,
        Some(value) => return Err(ListingError::Invalid { field: "IsTruncated", value: value.to_owned() }),
        None => return Err(ListingError::Missing { field: "IsTruncated" }),
    };
    let token = token.filter(|it| !it.is_empty());
    if is_truncated != token.is_some() {
        return Err(ListingError::Missing { field: "NextContinuationToken" });
    }
    listing.next_continuation_token = token;
    Ok(listing)
}

fn object(content: &str) -> Result<ListedObject, ListingError> {
    let required =
        |field| -> Result<String, ListingError> { child(content, field)?.ok_or(ListingError::Missing { field }) };
    let invalid = |field, value: String| ListingError::Invalid { field, value };
    let size = required("Size")?;
    let last_modified = required("LastModified")?;
    Ok(ListedObject {
        key: required("Key")?,
        size: size.parse().map_err(|_| invalid("Size", size.clone()))?,
        last_modified: OffsetDateTime::parse(&last_modified, &Rfc3339)
            .map_err(|_| invalid("LastModified", last_modified.clone()))?,
        storage_class: child(content, "StorageClass")?,
        restore_status: restore_status(content)?,
        etag: child(content, "ETag")?.filter(|it| !it.is_empty()).unwrap_or_else(|| NO_ETAG.to_owned()),
    })
}

fn restore_status(content: &str) -> Result<Option<RestoreStatus>, ListingError> {
    let Some(status) = element(content, "RestoreStatus")? else { return Ok(None) };
    if child(status, "IsRestoreInProgress")?.as_deref() == Some("true") {
        return Ok(Some(RestoreStatus::InProgress));
    }
    let Some(expiry) = child(status, "RestoreExpiryDate")? else { return Ok(None) };
    let parsed = OffsetDateTime::parse(&expiry, &Rfc3339);
    let expiry = parsed.map_err(|_| ListingError::Invalid { field: "RestoreExpiryDate", value: expiry.clone() })?;
    Ok(Some(RestoreStatus::Restored { expiry: expiry.into() }))
}

/// The text of the first child with that name.
fn child(content: &str, name: &str) -> Result<Option<String>, ListingError> {
    element(content, name)?.map(plain).transpose()
}

/// The content of the first child with that name.
fn element<'a>(content: &'a str, wanted: &str) -> Result<Option<&'a str>, ListingError> {
    for (name, content) in (Children { rest: content }) {
        if name == wanted {
            return content.map(Some);
        }
        content?;
    }
    Ok(None)
}

/// The elements in a text, with their names and contents. Ends after the first error.
struct Children<'a> {
    rest: &'a str,
}

impl<'a> Children<'a> {
    /// Those of the outermost element.
    fn of_root(text: &'a str) -> Result<Self, ListingError> {
        let mut outside = Self { rest: text };
        match outside.next() {
            Some(("ListBucketResult", content)) => Ok(Self { rest: content? }),
            Some((_, Ok(_))) | None => Err(malformed("it is no ListBucketResult")),
            Some((_, Err(error))) => Err(error),
        }
    }

    /// Moves behind everything that is no element: text, comments, the declaration.
    fn skip_to_tag(&mut self) {
        while let Some((_, rest)) = self.rest.split_once('<') {
            let end = match rest {
                _ if rest.starts_with("!--") => "-->",
                _ if rest.starts_with(['?', '!']) => ">",
                _ => {
                    self.rest = rest;
                    return;
                }
            };
            self.rest = rest.split_once(end).map_or("", |(_, rest)| rest);
        }
        self.rest = "";
    }
}

impl<'a> Iterator for Children<'a> {
    type Item = (&'a str, Result<&'a str, ListingError>);

    fn next(&mut self) -> Option<Self::Item> {
        self.skip_to_tag();
        if self.rest.is_empty() {
            return None;
        }
        let Some((tag, rest)) = self.rest.split_once('>') else {
            self.rest = "";
            return Some(("", Err(malformed("a tag does not end"))));
        };
        let name = tag.split([' ', '\t', '\n', '\r', '/']).next().unwrap_or_default();
        if name.is_empty() {
            self.rest = "";
            return Some(("", Err(malformed("an element ends that did not begin"))));
        }
        if tag.ends_with('/') {
            self.rest = rest;
            return Some((name, Ok("")));
        }
        // No element of a listing contains another one of its own name.
        if let Some((content, rest)) = rest.split_once(&format!("</{name}>")) {
            self.rest = rest;
            Some((name, Ok(content)))
        } else {
            self.rest = "";
            Some((name, Err(malformed("an element does not end"))))
        }
    }
}

/// The characters that a text without elements stands for.
fn plain(text: &str) -> Result<String, ListingError> {
    if text.contains('<') {
        return Err(malformed("an element in place of a text"));
    }
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('&') {
        let (name, after) = after.split_once(';').ok_or(malformed("a reference does not end"))?;
        plain.push_str(before);
        plain.push_str(&character(name).ok_or(malformed("an unknown reference"))?);
        rest = after;
    }
    plain.push_str(rest);
    Ok(plain)
}

fn character(name: &str) -> Option<Cow<'static, str>> {
    let Some(number) = name.strip_prefix('#') else {
        return Some(Cow::Borrowed(match name {
            "amp" => "&",
            "lt" => "<",
            "gt" => ">",
            "quot" => "\"",
            "apos" => "'",
            _ => return None,
        }));
    };
    let code = match number.strip_prefix('x') {
        Some(digits) => u32::from_str_radix(digits, 16).ok()?,
        None => number.parse().ok()?,
    };
    char::from_u32(code).map(|it| Cow::Owned(it.to_string()))
}

const fn malformed(problem: &'static str) -> ListingError {
    ListingError::Malformed { problem }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEAD: &str =
        "<?xml version=\"1.0\"?>\n<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>b</Name>";

    fn entry(key: &str, etag: &str) -> String {
        format!(
            "<Contents><Key>{key}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>{etag}<Size>7</Size>\
             <Owner><ID>o</ID></Owner><StorageClass>STANDARD</StorageClass></Contents>"
        )
    }

    fn page(entries: &str, end: &str) -> String {
        format!("{HEAD}{entries}{end}</ListBucketResult>")
    }

    const LAST: &str = "<IsTruncated>false</IsTruncated>";

    #[test]
    fn objects_with_and_without_etag_are_listed() {
        let entries = [
            entry("a&amp;b &lt;&#246;&#x20AC;>", "<ETag>&quot;1&quot;</ETag>"),
            entry("empty", "<ETag></ETag>"),
            entry("closed", "<ETag/>"),
            entry("missing", ""),
        ];
        let prefixes = "<CommonPrefixes><Prefix>d/</Prefix></CommonPrefixes>";
        let end = "<NextContinuationToken>more</NextContinuationToken><IsTruncated>true</IsTruncated>";
        let listing = parse(&page(&(entries.concat() + prefixes), end)).unwrap();
        let found: Vec<(&str, &str)> = listing.objects.iter().map(|it| (it.key.as_str(), it.etag.as_str())).collect();
        assert_eq!(found, [("a&b <ö€>", "\"1\""), ("empty", NO_ETAG), ("closed", NO_ETAG), ("missing", NO_ETAG)],);
        assert_eq!((listing.objects[0].size, listing.objects[0].last_modified.year()), (7, 2026));
        assert_eq!(listing.objects[0].storage_class.as_deref(), Some("STANDARD"));
        assert_eq!(listing.common_prefixes, ["d/"]);
        assert_eq!(listing.next_continuation_token.as_deref(), Some("more"));
    }

    #[test]
    fn archived_objects_are_distinguished_from_restored_ones() {
        let status = |text: &str| {
            let entry = entry("a", &format!("<RestoreStatus>{text}</RestoreStatus>"));
            parse(&page(&entry, LAST)).unwrap().objects[0].restore_status
        };
        assert!(matches!(status("<IsRestoreInProgress>true</IsRestoreInProgress>"), Some(RestoreStatus::InProgress)));
        let restored = "<IsRestoreInProgress>false</IsRestoreInProgress>\
                        <RestoreExpiryDate>2026-01-02T03:04:05Z</RestoreExpiryDate>";
        assert!(matches!(status(restored), Some(RestoreStatus::Restored { .. })));
    }

    #[test]
    fn what_is_no_listing_is_refused() {
        for (text, problem) in [
            ("", "no ListBucketResult"),
            ("<html>hello</html>", "no ListBucketResult"),
            ("<ListBucketResult>", "does not end"),
            (&page(&entry("a", ""), ""), "without IsTruncated"),
            (&page("", "<IsTruncated>true</IsTruncated>"), "without NextContinuationToken"),
            (&page("<Contents><Key>a</Key></Contents>", LAST), "without Size"),
            (&page(&entry("a&b;", ""), LAST), "unknown reference"),
            (&page(&entry("<b/>", ""), LAST), "in place of a text"),
            (&page(&entry("a", "").replace('7', "-7"), LAST), "invalid Size"),
        ] {
            let error = parse(text).map(drop).unwrap_err().to_string();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_listings_never_panic(text in "\\PC{0,200}") {
            let _ = parse(&text);
        }

        #[test]
        fn arbitrary_elements_never_panic(text in "(</?(Contents|Key|ETag|Size|LastModified|IsTruncated|CommonPrefixes|Prefix)/?>|[a&;#x0-9<>!?-]){0,40}") {
            let _ = parse(&page(&text, LAST));
            let _ = parse(&text);
        }

        #[test]
        fn keys_are_listed_as_they_were_written(key in "\\PC{1,40}") {
            let written = key.replace('&', "&amp;").replace('<', "&lt;");
            let listing = parse(&page(&entry(&written, "<ETag/>"), LAST)).unwrap();
            prop_assert_eq!(&listing.objects[0].key, &key);
        }
    }
}
