//! Metadata of objects: what HEAD responses say anyway, and what is sent along with the next upload of a key.
//!
//! The client library drops the metadata of a HEAD response. Its telemetry callback sees the headers before the request
//! returns, so nothing costs a request of its own.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use mountpoint_s3_client::OnTelemetry;
use mountpoint_s3_crt::s3::client::RequestMetrics;
use parking_lot::Mutex;
use percent_encoding::percent_decode;

use super::get_headers::{GetHeaders, ObjectSummary};

const PREFIX: &str = "x-amz-meta-";
/// Headers of an object that a copy with new metadata must send again.
const KEPT_HEADERS: [&str; 6] = [
    "content-type",
    "cache-control",
    "content-encoding",
    "content-disposition",
    "content-language",
    "x-amz-storage-class",
];
/// They bound the memory: about 300 bytes each.
const MOST_KNOWN: usize = 50_000;

const MOST_DIRECTORIES: usize = 10_000;
/// Other mounts see changed attributes of a directory after this time at the latest.
const MARKER_INTERVAL: Duration = Duration::from_mins(1);

/// User-defined metadata, without the prefix `x-amz-meta-`.
pub type UserMetadata = HashMap<String, String>;

/// What is known of one version of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectHeaders {
    pub etag: String,
    pub metadata: UserMetadata,
    /// Content type and the like, by name.
    pub others: Vec<(String, String)>,
    /// When its content was written, if this engine did it. The store knows a later time, in whole seconds.
    pub written: Option<SystemTime>,
    /// The store's time, as it spells it. None if it was not asked yet.
    pub last_modified: Option<String>,
}

impl ObjectHeaders {
    /// What we know of an object that we stored.
    pub fn new(etag: &str, metadata: UserMetadata) -> Self {
        Self { etag: etag.to_owned(), metadata, ..Self::default() }
    }

    #[must_use]
    pub fn written_at(self, time: SystemTime) -> Self {
        Self { written: Some(time), ..self }
    }

    /// The time at which this engine wrote an object is its time as long as it is the same one.
    fn with_time_of(mut self, known: &Self) -> Self {
        let is_same_time = match (&self.last_modified, &known.last_modified) {
            (Some(found), Some(known)) => found == known,
            _ => true,
        };
        if self.written.is_none() && same_etag(&self.etag, &known.etag) && is_same_time {
            self.written = known.written;
            self.last_modified = self.last_modified.or_else(|| known.last_modified.clone());
        }
        self
    }
}

#[derive(Default)]
pub struct MetadataCache {
    bucket: String,
    state: Mutex<State>,
    /// For those who look at an object by reading it.
    pub gets: GetHeaders,
}

#[derive(Default)]
struct State {
    known: HashMap<String, Arc<ObjectHeaders>>,
    /// Keys in the order in which they became known.
    order: VecDeque<String>,
    /// Whether objects in a directory have metadata, as far as it was seen.
    directories: HashMap<String, bool>,
    /// When the markers of directories were last asked about, or stored.
    markers: HashMap<String, Instant>,
    /// To be sent with the next upload of a key.
    outgoing: HashMap<String, UserMetadata>,
}

impl MetadataCache {
    pub fn new(bucket: &str) -> Self {
        Self { bucket: bucket.to_owned(), ..Self::default() }
    }

    /// What is known of the object, if it is this version.
    pub fn get(&self, key: &str, etag: &str) -> Option<Arc<ObjectHeaders>> {
        self.state.lock().known.get(key).filter(|it| same_etag(&it.etag, etag)).cloned()
    }

    /// What is known of the object, whichever version it is.
    pub fn latest(&self, key: &str) -> Option<Arc<ObjectHeaders>> {
        self.state.lock().known.get(key).cloned()
    }

    pub fn insert(&self, key: &str, headers: ObjectHeaders) {
        let mut state = self.state.lock();
        if key.ends_with('/') {
            state.note_marker(key);
        } else if !headers.metadata.is_empty() {
            state.note_directory(key, true);
        }
        let headers = match state.known.get(key) {
            Some(known) => headers.with_time_of(known),
            None => headers,
        };
        if state.known.insert(key.to_owned(), Arc::new(headers)).is_none() {
            state.order.push_back(key.to_owned());
        }
        while MOST_KNOWN < state.order.len() {
            if let Some(oldest) = state.order.pop_front() {
                state.known.remove(&oldest);
            }
        }
    }

    /// A renamed object has the time at which it was written here, not that of the copy.
    pub fn moved(&self, from: &str, to: &str) {
        if let Some(known) = self.latest(from).filter(|it| it.written.is_some()) {
            self.insert(to, ObjectHeaders { last_modified: None, ..(*known).clone() });
        }
    }

    /// Whether a HEAD may tell more of an object than a listing did. One object of each directory is asked about; if it has no
    /// metadata, the others probably have none, and listing a large directory costs no request per file.
    pub fn is_worth_asking(&self, key: &str) -> bool {
        let mut state = self.state.lock();
        if let Some(has_metadata) = state.directories.get(directory(key)) {
            return *has_metadata;
        }
        state.note_directory(key, false);
        true
    }

    /// Whether a HEAD of a directory's marker may tell something new. Lookups never ask about it.
    pub fn is_marker_worth_asking(&self, key: &str) -> bool {
        let mut state = self.state.lock();
        let is_due = state.markers.get(key).is_none_or(|asked| MARKER_INTERVAL <= asked.elapsed());
        if is_due {
            state.note_marker(key);
        }
        is_due
    }

    /// A listing has shown that this directory has no marker: there is nothing to ask.
    pub fn note_missing_marker(&self, key: &str) {
        self.state.lock().note_marker(key);
    }

    /// Whether no object in the directory of this key was asked about yet.
    pub fn is_first_beside(&self, key: &str) -> bool {
        !self.state.lock().directories.contains_key(directory(key))
    }

    /// Whether objects in the directory of this key are known to have metadata.
    pub fn has_metadata_beside(&self, key: &str) -> bool {
        self.state.lock().directories.get(directory(key)).copied().unwrap_or(false)
    }

    /// The next upload of this key carries this metadata.
    pub fn send(&self, key: &str, metadata: UserMetadata) {
        self.state.lock().outgoing.insert(key.to_owned(), metadata);
    }

    pub fn take_outgoing(&self, key: &str) -> Option<UserMetadata> {
        self.state.lock().outgoing.remove(key)
    }

    /// The keys that a request path may mean: with path-style addressing the bucket comes first.
    fn keys(&self, path: &str) -> Vec<String> {
        let path = path.split('?').next().unwrap_or_default();
        let Ok(path) = percent_decode(path.as_bytes()).decode_utf8() else { return Vec::new() };
        let path = path.trim_start_matches('/');
        let in_bucket = path.strip_prefix(&self.bucket).and_then(|it| it.strip_prefix('/'));
        // Which of the two it is does not matter: the entry is used for an object with its ETag only.
        in_bucket.into_iter().chain([path]).filter(|it| !it.is_empty()).map(str::to_owned).collect()
    }
}

impl State {
    fn note_marker(&mut self, key: &str) {
        if MOST_DIRECTORIES < self.markers.len() {
            self.markers.clear();
        }
        self.markers.insert(key.to_owned(), Instant::now());
    }

    fn note_directory(&mut self, key: &str, has_metadata: bool) {
        if MOST_DIRECTORIES < self.directories.len() {
            self.directories.clear();
        }
        self.directories.insert(directory(key).to_owned(), has_metadata);
    }
}

fn directory(key: &str) -> &str {
    key.rsplit_once('/').map_or("", |(directory, _)| directory)
}

fn same_etag(one: &str, other: &str) -> bool {
    one.trim_matches('"') == other.trim_matches('"')
}

impl fmt::Debug for MetadataCache {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("MetadataCache").field("bucket", &self.bucket).finish_non_exhaustive()
    }
}

impl OnTelemetry for MetadataCache {
    fn on_telemetry(&self, metrics: &RequestMetrics) {
        // Reading files must not pay for it.
        let is_get = match metrics.operation_name() {
            Some("HeadObject") => false,
            Some("GetObject") if self.gets.is_any_expected() => true,
            _ => return,
        };
        let Some(headers) = metrics.response_headers() else { return };
        let attributes = is_get.then(|| ObjectSummary::parse(|name| headers.get_as_optional_string(name).ok()?));
        let mut found = ObjectHeaders::default();
        for (name, value) in headers.iter() {
            let (name, value) = (name.to_string_lossy().to_ascii_lowercase(), value.to_string_lossy().into_owned());
            if name == "etag" {
                found.etag = value;
            } else if name == "last-modified" {
                found.last_modified = Some(value);
            } else if let Some(name) = name.strip_prefix(PREFIX) {
                found.metadata.insert(name.to_owned(), value);
            } else if KEPT_HEADERS.contains(&name.as_str()) {
                found.others.push((name, value));
            }
        }
        if found.etag.is_empty() || attributes == Some(None) {
            return;
        }
        let path = metrics.request_path_query();
        for key in path.map(|it| self.keys(&it)).unwrap_or_default() {
            if let Some(Some(attributes)) = &attributes {
                self.gets.note(&key, attributes);
            }
            self.insert(&key, found.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(etag: &str) -> ObjectHeaders {
        ObjectHeaders { etag: etag.into(), ..ObjectHeaders::default() }
    }

    #[test]
    fn metadata_belongs_to_one_version_of_an_object() {
        let cache = MetadataCache::new("bucket");
        cache.insert("key", headers("\"1\""));
        assert!(cache.get("key", "1").is_some());
        assert!(cache.get("key", "2").is_none());
        cache.insert("key", headers("2"));
        assert!(cache.get("key", "\"1\"").is_none());
    }

    #[test]
    fn the_time_at_which_an_object_was_written_here_stays_as_long_as_it_is_the_same_one() {
        let cache = MetadataCache::new("bucket");
        let time = SystemTime::UNIX_EPOCH + Duration::from_millis(1_234_567);
        let asked = |etag: &str, time: &str| ObjectHeaders { last_modified: Some(time.into()), ..headers(etag) };
        let written = |key: &str| cache.latest(key).unwrap().written;
        cache.insert("key", headers("1").written_at(time));
        for _ in 0..2 {
            cache.insert("key", asked("\"1\"", "Mon"));
            assert_eq!(written("key"), Some(time));
        }
        cache.moved("key", "moved");
        cache.insert("moved", asked("1", "Tue"));
        assert_eq!(written("moved"), Some(time));
        // Another client has stored the same bytes once more, or other ones.
        cache.insert("key", asked("1", "Wed"));
        assert_eq!(written("key"), None);
        cache.insert("moved", asked("2", "Tue"));
        assert_eq!(written("moved"), None);
    }

    #[test]
    fn request_paths_are_keys_with_or_without_the_bucket() {
        let cache = MetadataCache::new("bucket");
        assert_eq!(cache.keys("/bucket/a%20b/c?x=1"), ["a b/c", "bucket/a b/c"]);
        assert_eq!(cache.keys("/a"), ["a"]);
        assert_eq!(cache.keys("/"), Vec::<String>::new());
    }

    #[test]
    fn the_number_of_known_objects_is_bounded() {
        let cache = MetadataCache::new("bucket");
        for number in 0..MOST_KNOWN + 10 {
            cache.insert(&number.to_string(), headers("1"));
        }
        let state = cache.state.lock();
        assert_eq!((state.known.len(), state.order.len()), (MOST_KNOWN, MOST_KNOWN));
    }

    #[test]
    fn one_object_of_a_directory_is_asked_about_unless_some_have_metadata() {
        let cache = MetadataCache::new("bucket");
        assert!(cache.is_first_beside("a/1") && cache.is_worth_asking("a/1"));
        assert!(!cache.is_first_beside("a/2") && !cache.is_worth_asking("a/2"));
        assert!(cache.is_worth_asking("b/1"));
        cache.insert("a/3", ObjectHeaders::new("1", UserMetadata::from([("mode".into(), "33188".into())])));
        assert!(cache.is_worth_asking("a/2") && cache.has_metadata_beside("a/2") && !cache.has_metadata_beside("b/2"));
    }

    #[test]
    fn a_marker_is_asked_about_once_and_tells_nothing_of_the_files_beneath() {
        let cache = MetadataCache::new("bucket");
        assert!(cache.is_marker_worth_asking("a/") && !cache.is_marker_worth_asking("a/"));
        cache.insert("b/", ObjectHeaders::new("1", UserMetadata::from([("mode".into(), "16832".into())])));
        assert!(!cache.is_marker_worth_asking("b/") && !cache.has_metadata_beside("b/1"));
    }

    #[test]
    fn what_is_to_be_sent_is_sent_once() {
        let cache = MetadataCache::new("bucket");
        cache.send("key", UserMetadata::from([("mode".into(), "33188".into())]));
        assert!(cache.take_outgoing("key").is_some());
        assert!(cache.take_outgoing("key").is_none());
    }
}
