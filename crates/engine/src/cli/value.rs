//! Parsers of single values on the command line.

use std::path::Path;

use clap::builder::RangedU64ValueParser;

/// S3's smallest part of a multipart upload; the client library refuses less.
const SMALLEST_PART: u64 = 5 << 20;
/// S3's largest part.
const LARGEST_PART: u64 = 5 << 30;

pub fn part_size() -> RangedU64ValueParser<u64> {
    RangedU64ValueParser::new().range(SMALLEST_PART..=LARGEST_PART)
}

pub fn permissions(text: &str) -> Result<u16, String> {
    match u16::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("permissions are octal digits from 0 to 777".into()),
    }
}

pub fn kms_key(text: &str) -> Result<String, String> {
    if text.starts_with("arn:") { Ok(text.to_owned()) } else { Err("the key must be given as an ARN".into()) }
}

pub fn endpoint(text: &str) -> Result<String, String> {
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    match host {
        Some(host) if !host.is_empty() && !host.starts_with('/') => Ok(text.to_owned()),
        _ => Err("the address must look like https://host or http://host:port".into()),
    }
}

/// The number N of `/dev/fd/N`.
pub fn descriptor(mount_point: &Path) -> Option<i32> {
    let digits = mount_point.to_str()?.strip_prefix("/dev/fd/")?;
    let is_number = !digits.is_empty() && digits.bytes().all(|it| it.is_ascii_digit());
    if is_number { digits.parse().ok() } else { None }
}
