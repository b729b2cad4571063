//! The metadata that are stored with a volume: proof that it is ours, what was requested, and what to do when it is
//! deleted. A list of short texts, so that it can be stored as tags of a bucket or as lines of an object.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::prefix::Prefix;
use crate::publish::AuthenticationSource;

use super::create::CapacityRange;
use super::id::VolumeKey;
use super::parameters::OnDelete;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeRecord {
    pub volume: VolumeKey,
    pub on_delete: OnDelete,
    /// As requested; not enforced.
    pub capacity_bytes: u64,
    /// Which keys mount the volume.
    pub authentication_source: AuthenticationSource,
    /// Which keys created the volume and must delete it.
    pub provisioned_with: AuthenticationSource,
    pub region: Option<String>,
    /// For a volume in a shared bucket.
    pub prefix: Option<Prefix>,
    /// `namespace/name`; informational.
    pub claim: Option<String>,
}

/// What was requested before differs from what is requested now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} is {before}, but {now} is requested")]
pub struct RecordDifference {
    pub what: &'static str,
    pub before: String,
    pub now: String,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the volume's metadata is not valid: {name} is {value:?}; a newer version of the driver may have written it")]
pub struct UnreadableRecord {
    pub name: &'static str,
    pub value: String,
}

const VOLUME: &str = "s3csi/volume";
const ON_DELETE: &str = "s3csi/on-delete";
const CAPACITY: &str = "s3csi/capacity-bytes";
const AUTHENTICATION_SOURCE: &str = "s3csi/authentication-source";
const PROVISIONED_WITH: &str = "s3csi/provisioned-with";
const REGION: &str = "s3csi/region";
const PREFIX: &str = "s3csi/prefix";
const CLAIM: &str = "s3csi/claim";

impl VolumeRecord {
    pub fn entries(&self) -> Vec<(&'static str, String)> {
        // No `..`: a field that is not stored does not compile.
        let Self { volume, on_delete, capacity_bytes, authentication_source, provisioned_with, region, prefix, claim } =
            self;
        let mut entries = vec![
            (VOLUME, volume.to_string()),
            (ON_DELETE, on_delete.to_string()),
            (CAPACITY, capacity_bytes.to_string()),
            (AUTHENTICATION_SOURCE, authentication_source.to_string()),
            (PROVISIONED_WITH, provisioned_with.to_string()),
        ];
        let optional =
            [(REGION, region.clone()), (PREFIX, prefix.as_ref().map(Prefix::to_string)), (CLAIM, claim.clone())];
        entries.extend(optional.into_iter().filter_map(|(name, value)| Some((name, value?))));
        entries
    }

    /// `None` if these entries are not ours.
    pub fn from_entries(entries: &BTreeMap<String, String>) -> Result<Option<Self>, UnreadableRecord> {
        let Some(volume) = entries.get(VOLUME) else {
            return Ok(None);
        };
        let prefix = match entries.get(PREFIX) {
            Some(_) => Some(read(entries, PREFIX, |it| it.parse().ok())?),
            None => None,
        };
        Ok(Some(Self {
            volume: VolumeKey::parse(volume).ok_or_else(|| UnreadableRecord { name: VOLUME, value: volume.clone() })?,
            on_delete: read(entries, ON_DELETE, |it| it.parse().ok())?,
            capacity_bytes: read(entries, CAPACITY, |it| it.parse().ok())?,
            authentication_source: read(entries, AUTHENTICATION_SOURCE, AuthenticationSource::parse)?,
            provisioned_with: match entries.get(PROVISIONED_WITH) {
                Some(_) => read(entries, PROVISIONED_WITH, AuthenticationSource::parse)?,
                // Written by versions before 0.2: a volume that is mounted with a Secret was most likely created with one.
                None => read(entries, AUTHENTICATION_SOURCE, AuthenticationSource::parse)?,
            },
            region: entries.get(REGION).cloned(),
            prefix,
            claim: entries.get(CLAIM).cloned(),
        }))
    }

    /// As the content of an object: one entry per line.
    pub fn to_text(&self) -> String {
        self.entries().iter().fold(String::new(), |mut text, (name, value)| {
            // Writing to a String cannot fail. No value has a line break: all were checked.
            let _ = writeln!(text, "{name}={value}");
            text
        })
    }

    pub fn from_text(text: &str) -> Result<Option<Self>, UnreadableRecord> {
        let entries = text.lines().filter_map(|it| it.split_once('='));
        Self::from_entries(&entries.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }

    /// Why the existing volume is not the one that is requested now. The claim is informational.
    pub fn difference(&self, wanted: &Self, capacity: CapacityRange) -> Option<RecordDifference> {
        let Self {
            volume,
            on_delete,
            capacity_bytes,
            authentication_source,
            provisioned_with,
            region,
            prefix,
            claim: _,
        } = self;
        let none = || "none".to_owned();
        let text = |it: &Option<String>| it.clone().unwrap_or_else(none);
        let path = |it: &Option<Prefix>| it.as_ref().map_or_else(none, Prefix::to_string);
        let pairs = [
            ("its volume", volume.to_string(), wanted.volume.to_string()),
            ("onDelete", on_delete.to_string(), wanted.on_delete.to_string()),
            ("authenticationSource", authentication_source.to_string(), wanted.authentication_source.to_string()),
            ("its provisioning keys", provisioned_with.to_string(), wanted.provisioned_with.to_string()),
            ("region", text(region), text(&wanted.region)),
            ("its prefix", path(prefix), path(&wanted.prefix)),
        ];
        let different = pairs.into_iter().find(|(_, before, now)| before != now);
        different.map(|(what, before, now)| RecordDifference { what, before, now }).or_else(|| {
            (!capacity.includes(*capacity_bytes)).then(|| RecordDifference {
                what: "its capacity in bytes",
                before: capacity_bytes.to_string(),
                now: capacity.to_string(),
            })
        })
    }
}

/// For people, so it may be cut: no control character can add a line, and the value of a tag has at most 256 characters.
pub(super) fn claim_text(namespace: &str, name: &str) -> String {
    format!("{namespace}/{name}").chars().filter(|it| !it.is_control()).take(256).collect()
}

fn read<T>(
    entries: &BTreeMap<String, String>,
    name: &'static str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<T, UnreadableRecord> {
    let value = entries.get(name).map(String::as_str).unwrap_or_default();
    parse(value).ok_or_else(|| UnreadableRecord { name, value: value.to_owned() })
}
