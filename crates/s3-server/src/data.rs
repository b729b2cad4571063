//! What the in-process server holds: accounts, buckets, objects, uploads in progress, and the rules of a listing.
//! No HTTP here and no S3 types that only travel; `operations` translates.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use bytes::Bytes;
use md5::{Digest, Md5};
use s3s::dto::{Checksum, Metadata};

use crate::sessions::StoredSession;

#[derive(Default)]
pub(crate) struct Data {
    /// Access key to secret key.
    pub accounts: BTreeMap<String, String>,
    /// By access key, which is also among the accounts.
    pub sessions: BTreeMap<String, StoredSession>,
    pub buckets: BTreeMap<String, StoredBucket>,
    pub uploads: BTreeMap<String, StoredUpload>,
    pub uploads_ever: u64,
}

pub(crate) struct StoredBucket {
    /// The owner's access key; no other account may use the bucket.
    pub owner: String,
    pub created: SystemTime,
    /// Where its maker wanted it.
    pub location: Option<String>,
    pub tags: BTreeMap<String, String>,
    pub objects: BTreeMap<String, StoredObject>,
}

impl StoredBucket {
    pub fn new(owner: &str) -> Self {
        Self {
            owner: owner.to_owned(),
            created: SystemTime::now(),
            location: None,
            tags: BTreeMap::new(),
            objects: BTreeMap::new(),
        }
    }
}

/// What the client said about an object beside its content.
#[derive(Clone, Default)]
pub(crate) struct ObjectAttributes {
    pub metadata: Option<Metadata>,
    pub content_type: Option<String>,
    pub storage_class: Option<String>,
}

#[derive(Clone)]
pub(crate) struct StoredObject {
    /// As uploaded: joining 100 MB on every completed upload would be paid by every test.
    pub parts: Vec<Bytes>,
    pub size: u64,
    pub entity_tag: String,
    pub modified: SystemTime,
    pub attributes: ObjectAttributes,
    pub checksum: Checksum,
}

impl StoredObject {
    pub fn whole(content: Bytes, attributes: ObjectAttributes, checksum: Checksum) -> Self {
        let entity_tag = hex(&Md5::digest(&content));
        Self {
            size: content.len() as u64,
            parts: vec![content],
            entity_tag,
            modified: SystemTime::now(),
            attributes,
            checksum,
        }
    }

    /// The tag of a multipart object is the digest of its parts' digests and their number, as on real servers.
    pub fn assembled(parts: Vec<StoredPart>, attributes: ObjectAttributes) -> Self {
        let count = parts.len();
        let digests: Vec<u8> = parts.iter().flat_map(|it| it.digest).collect();
        Self {
            size: parts.iter().map(|it| it.content.len() as u64).sum(),
            parts: parts.into_iter().map(|it| it.content).collect(),
            entity_tag: format!("{}-{count}", hex(&Md5::digest(&digests))),
            modified: SystemTime::now(),
            attributes,
            checksum: Checksum::default(),
        }
    }

    /// The bytes of `start..end`, without copying.
    pub fn slices(&self, start: u64, end: u64) -> Vec<Bytes> {
        let mut slices = Vec::new();
        let mut offset = 0;
        for part in &self.parts {
            let length = part.len() as u64;
            let (from, until) = (start.max(offset), end.min(offset + length));
            if from < until {
                slices.push(part.slice(index(from - offset)..index(until - offset)));
            }
            offset += length;
        }
        slices
    }

    pub fn content(&self) -> Bytes {
        match self.parts.as_slice() {
            [only] => only.clone(),
            parts => parts.concat().into(),
        }
    }
}

#[derive(Clone)]
pub(crate) struct StoredPart {
    pub content: Bytes,
    pub digest: [u8; 16],
    pub modified: SystemTime,
}

impl StoredPart {
    pub fn new(content: Bytes) -> Self {
        let digest = Md5::digest(&content).into();
        Self { content, digest, modified: SystemTime::now() }
    }

    pub fn entity_tag(&self) -> String {
        hex(&self.digest)
    }
}

pub(crate) struct StoredUpload {
    pub bucket: String,
    pub key: String,
    pub initiated: SystemTime,
    pub attributes: ObjectAttributes,
    pub parts: BTreeMap<i32, StoredPart>,
}

/// Which part of a bucket a listing asks for.
pub(crate) struct Listing<'a> {
    pub prefix: &'a str,
    pub delimiter: Option<&'a str>,
    /// Only names after this one.
    pub after: &'a str,
    pub limit: usize,
}

pub(crate) struct ListingPage<'a> {
    pub objects: Vec<(&'a str, &'a StoredObject)>,
    pub common_prefixes: BTreeSet<String>,
    /// The last name of this page, when there is a next one.
    pub next: Option<String>,
}

impl StoredBucket {
    pub fn page(&self, listing: &Listing<'_>) -> ListingPage<'_> {
        let Listing { prefix, delimiter, after, limit } = *listing;
        let mut page = ListingPage { objects: Vec::new(), common_prefixes: BTreeSet::new(), next: None };
        let mut last = "";
        for (key, object) in self.objects.range(prefix.max(after).to_owned()..) {
            let Some(rest) = key.strip_prefix(prefix) else {
                break;
            };
            let grouped = delimiter.and_then(|it| rest.find(it).map(|at| &key[..prefix.len() + at + it.len()]));
            let name = grouped.unwrap_or(key);
            let is_seen = !after.is_empty() && name <= after || page.common_prefixes.contains(name);
            if is_seen {
                continue;
            }
            if page.objects.len() + page.common_prefixes.len() == limit {
                page.next = (0 < limit).then(|| last.to_owned());
                break;
            }
            match grouped {
                Some(_) => {
                    page.common_prefixes.insert(name.to_owned());
                }
                None => page.objects.push((key, object)),
            }
            last = name;
        }
        page
    }
}

pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn index(position: u64) -> usize {
    usize::try_from(position).expect("an object in memory is smaller than the memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(keys: &[&str]) -> StoredBucket {
        let mut bucket = StoredBucket::new("owner");
        for key in keys {
            bucket.objects.insert(
                (*key).to_owned(),
                StoredObject::whole(Bytes::new(), ObjectAttributes::default(), Checksum::default()),
            );
        }
        bucket
    }

    fn check(keys: &[&str], listing: &Listing<'_>, objects: &[&str], prefixes: &[&str], next: Option<&str>) {
        let bucket = bucket(keys);
        let page = bucket.page(listing);
        assert_eq!(page.objects.iter().map(|it| it.0).collect::<Vec<_>>(), objects);
        assert_eq!(page.common_prefixes.iter().map(String::as_str).collect::<Vec<_>>(), prefixes);
        assert_eq!(page.next.as_deref(), next);
    }

    #[test]
    fn listings_group_by_delimiter_and_continue_after_the_last_name() {
        let keys = ["a", "b/1", "b/2", "c", "d/x/y"];
        let whole = Listing { prefix: "", delimiter: Some("/"), after: "", limit: 1000 };
        check(&keys, &whole, &["a", "c"], &["b/", "d/"], None);
        check(&keys, &Listing { limit: 2, ..whole }, &["a"], &["b/"], Some("b/"));
        check(&keys, &Listing { after: "b/", limit: 2, ..whole }, &["c"], &["d/"], None);
        check(&keys, &Listing { prefix: "b/", ..whole }, &["b/1", "b/2"], &[], None);
        check(&keys, &Listing { prefix: "d/", delimiter: None, ..whole }, &["d/x/y"], &[], None);
        check(&keys, &Listing { limit: 0, ..whole }, &[], &[], None);
        check(&keys, &Listing { prefix: "e", ..whole }, &[], &[], None);
    }

    #[test]
    fn slices_cross_part_borders() {
        let parts = vec![StoredPart::new(Bytes::from_static(b"abc")), StoredPart::new(Bytes::from_static(b"def"))];
        let object = StoredObject::assembled(parts, ObjectAttributes::default());
        assert_eq!(object.slices(2, 5).concat(), b"cde");
        assert_eq!(object.content().as_ref(), b"abcdef");
        assert_eq!(object.size, 6);
    }
}
