//! Receives a request's body and proves it against the checksums the client claims, in a header or in a trailer.

use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use s3s::checksum::ChecksumHasher;
use s3s::crypto::{Checksum as _, Crc32, Crc32c, Crc64Nvme, Sha1, Sha256};
use s3s::dto::{Checksum, StreamingBlob};
use s3s::{S3Result, TrailingHeaders, s3_error};

pub(crate) async fn receive(
    body: Option<StreamingBlob>,
    mut claimed: Checksum,
    trailers: Option<TrailingHeaders>,
) -> S3Result<(Bytes, Checksum)> {
    let mut content = BytesMut::new();
    if let Some(mut body) = body {
        while let Some(chunk) = body.next().await {
            content.extend_from_slice(&chunk.map_err(|_| s3_error!(IncompleteBody))?);
        }
    }
    // Trailers exist only once the whole body was read.
    if let Some(trailers) = trailers {
        let trailer = |name: &str| {
            trailers.read(|it| it.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)).flatten()
        };
        claimed.checksum_crc32 = claimed.checksum_crc32.or_else(|| trailer("x-amz-checksum-crc32"));
        claimed.checksum_crc32c = claimed.checksum_crc32c.or_else(|| trailer("x-amz-checksum-crc32c"));
        claimed.checksum_crc64nvme = claimed.checksum_crc64nvme.or_else(|| trailer("x-amz-checksum-crc64nvme"));
        claimed.checksum_sha1 = claimed.checksum_sha1.or_else(|| trailer("x-amz-checksum-sha1"));
        claimed.checksum_sha256 = claimed.checksum_sha256.or_else(|| trailer("x-amz-checksum-sha256"));
    }
    let mut hasher = ChecksumHasher {
        crc32: claimed.checksum_crc32.as_ref().map(|_| Crc32::new()),
        crc32c: claimed.checksum_crc32c.as_ref().map(|_| Crc32c::new()),
        sha1: claimed.checksum_sha1.as_ref().map(|_| Sha1::new()),
        sha256: claimed.checksum_sha256.as_ref().map(|_| Sha256::new()),
        crc64nvme: claimed.checksum_crc64nvme.as_ref().map(|_| Crc64Nvme::new()),
    };
    hasher.update(&content);
    if hasher.finalize() != claimed {
        return Err(s3_error!(BadDigest, "The checksum you specified did not match what we received."));
    }
    Ok((content.freeze(), claimed))
}
