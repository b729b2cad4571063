//! The two values the client library gives us no constructor for.

use std::mem::MaybeUninit;

use mountpoint_s3_client::types::{ListObjectsResult, ObjectInfo, RenameObjectResult};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_of_nothing_is_empty() {
        let listing = nothing_listed();
        assert!(listing.objects.is_empty() && listing.common_prefixes.is_empty());
        assert_eq!(listing.next_continuation_token, None);
    }
}
