//! The one value the client library gives us no constructor for.

use mountpoint_s3_client::types::RenameObjectResult;

/// The answer "moved". It carries nothing, but is marked `non_exhaustive`, so only the library itself may write it down.
#[expect(unsafe_code, reason = "the type has no public constructor, and no fields")]
pub fn result() -> RenameObjectResult {
    const { assert!(size_of::<RenameObjectResult>() == 0) };
    // SAFETY: the type is a struct without fields (checked above to have no size), so it has exactly one value, of no bytes.
    unsafe { std::mem::transmute::<(), RenameObjectResult>(()) }
}
