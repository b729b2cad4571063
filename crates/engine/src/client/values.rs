//! The four values the client library gives us no constructor for.

use std::mem::MaybeUninit;

use mountpoint_s3_client::types::{
    Checksum, ChecksumAlgorithm, ETag, HeadObjectResult, ListObjectsResult, ObjectInfo, RenameObjectResult,
    RestoreStatus,
};
use time::OffsetDateTime;

use super::get_headers::ObjectSummary;

/// The answer "moved". It carries nothing, but is marked `non_exhaustive`, so only the library itself may write it down.
#[expect(unsafe_code, reason = "the type has no public constructor, and no fields")]
pub fn moved() -> RenameObjectResult {
    const { assert!(size_of::<RenameObjectResult>() == 0) };
    // SAFETY: the type is a struct without fields (checked above to have no size), so it has exactly one value, of no bytes.
    unsafe { std::mem::transmute::<(), RenameObjectResult>(()) }
}

/// A listing of nothing. All its fields are public, but it is marked `non_exhaustive`, too.
#[expect(unsafe_code, reason = "the type has no public constructor")]
pub fn nothing_listed() -> ListObjectsResult {
    // There is no field but the three below.
    const { assert!(size_of::<ListObjectsResult>() == size_of::<(Vec<ObjectInfo>, Vec<String>, Option<String>)>()) };
    let mut listing = MaybeUninit::<ListObjectsResult>::uninit();
    let pointer = listing.as_mut_ptr();
    // SAFETY: the pointer is that of memory for the whole struct, and each of its fields, which the size above shows to be all of
    // them, is written once before the struct is taken for one.
    unsafe {
        (&raw mut (*pointer).objects).write(Vec::new());
        (&raw mut (*pointer).common_prefixes).write(Vec::new());
        (&raw mut (*pointer).next_continuation_token).write(None);
        listing.assume_init()
    }
}

/// What a listing says of an object, as far as the file system uses it.
pub struct ListedObject {
    pub key: String,
    pub size: u64,
    pub last_modified: OffsetDateTime,
    pub storage_class: Option<String>,
    pub restore_status: Option<RestoreStatus>,
    pub etag: String,
}

/// The entry of an object in a listing. All its fields are public, but it is marked `non_exhaustive`, too.
#[expect(unsafe_code, reason = "the type has no public constructor")]
pub fn object_info(object: ListedObject) -> ObjectInfo {
    // There is no field but those of `ListedObject` and the list of algorithms.
    const { assert!(size_of::<ObjectInfo>() == size_of::<(ListedObject, Vec<ChecksumAlgorithm>)>()) };
    let ListedObject { key, size, last_modified, storage_class, restore_status, etag } = object;
    let mut info = MaybeUninit::<ObjectInfo>::uninit();
    let pointer = info.as_mut_ptr();
    // SAFETY: the pointer is that of memory for the whole struct, and each of its fields, which the size above shows to be all of
    // them, is written once before the struct is taken for one.
    unsafe {
        (&raw mut (*pointer).key).write(key);
        (&raw mut (*pointer).size).write(size);
        (&raw mut (*pointer).last_modified).write(last_modified);
        (&raw mut (*pointer).storage_class).write(storage_class);
        (&raw mut (*pointer).restore_status).write(restore_status);
        (&raw mut (*pointer).etag).write(etag);
        (&raw mut (*pointer).checksum_algorithms).write(Vec::new());
        info.assume_init()
    }
}

/// The answer to HEAD. All its fields are public, but it is marked `non_exhaustive`, too.
#[expect(unsafe_code, reason = "the type has no public constructor")]
pub fn head_result(attributes: &ObjectSummary) -> HeadObjectResult {
    type Fields =
        (u64, OffsetDateTime, ETag, Option<String>, Option<RestoreStatus>, Checksum, Option<String>, Option<String>);
    // There is no field but those below.
    const { assert!(size_of::<HeadObjectResult>() == size_of::<Fields>()) };
    let mut result = MaybeUninit::<HeadObjectResult>::uninit();
    let pointer = result.as_mut_ptr();
    // SAFETY: the pointer is that of memory for the whole struct, and each of its fields, which the size above shows to be all of
    // them, is written once before the struct is taken for one.
    unsafe {
        (&raw mut (*pointer).size).write(attributes.size);
        (&raw mut (*pointer).last_modified).write(attributes.last_modified);
        (&raw mut (*pointer).etag).write(ETag::from(attributes.etag.as_str()));
        (&raw mut (*pointer).storage_class).write(None);
        (&raw mut (*pointer).restore_status).write(None);
        (&raw mut (*pointer).checksum).write(Checksum::empty());
        (&raw mut (*pointer).sse_type).write(None);
        (&raw mut (*pointer).sse_kms_key_id).write(None);
        result.assume_init()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_to_head_has_what_was_given() {
        let attributes = ObjectSummary { size: 7, last_modified: OffsetDateTime::UNIX_EPOCH, etag: "\"etag\"".into() };
        let HeadObjectResult { size, last_modified, etag, storage_class, restore_status, .. } =
            head_result(&attributes);
        assert_eq!((size, last_modified, etag.as_str()), (7, OffsetDateTime::UNIX_EPOCH, "\"etag\""));
        assert!(storage_class.is_none() && restore_status.is_none());
    }

    #[test]
    fn an_entry_has_what_was_given() {
        let info = object_info(ListedObject {
            key: "key".into(),
            size: 7,
            last_modified: OffsetDateTime::UNIX_EPOCH,
            storage_class: Some("STANDARD".into()),
            restore_status: None,
            etag: "\"etag\"".into(),
        });
        assert_eq!((info.key.as_str(), info.size, info.etag.as_str()), ("key", 7, "\"etag\""));
        assert_eq!((info.last_modified, info.storage_class.as_deref()), (OffsetDateTime::UNIX_EPOCH, Some("STANDARD")));
        assert!(info.restore_status.is_none() && info.checksum_algorithms.is_empty());
    }

    #[test]
    fn a_listing_of_nothing_is_empty() {
        let listing = nothing_listed();
        assert!(listing.objects.is_empty() && listing.common_prefixes.is_empty());
        assert_eq!(listing.next_continuation_token, None);
    }
}
