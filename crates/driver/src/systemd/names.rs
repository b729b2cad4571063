//! How systemd spells things: unit names as object paths, and arguments that must not be expanded.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

const UNITS: &str = "/org/freedesktop/systemd1/unit/";

/// The object path of a unit: ASCII letters, and digits but for a first one, stand for themselves; others are `_` and two hex digits.
pub fn unit_path(name: &str) -> String {
    let mut path = String::from(UNITS);
    if name.is_empty() {
        path.push('_');
    }
    for (index, byte) in name.bytes().enumerate() {
        if byte.is_ascii_alphabetic() || (index > 0 && byte.is_ascii_digit()) {
            path.push(char::from(byte));
        } else {
            path.push('_');
            path.extend([byte >> 4, byte & 15].map(|it| char::from_digit(it.into(), 16).unwrap_or('0')));
        }
    }
    path
}

/// The name behind an object path, if it is one of a unit.
pub fn unit_name(path: &str) -> Option<String> {
    let mut rest = path.strip_prefix(UNITS)?.as_bytes();
    let mut name = Vec::new();
    while let [first, tail @ ..] = rest {
        rest = match (first, tail) {
            (b'_', []) if name.is_empty() => tail,
            (b'_', [high, low, after @ ..]) => {
                let digit = |it: u8| char::from(it).to_digit(16).and_then(|it| u8::try_from(it).ok());
                name.push(digit(*high)? << 4 | digit(*low)?);
                after
            }
            (b'_', _) => return None,
            _ => {
                name.push(*first);
                tail
            }
        };
    }
    String::from_utf8(name).ok()
}

/// systemd expands `$VAR` and `${VAR}` in arguments; `$$` is one `$`.
pub fn escape_argument(argument: &str) -> String {
    argument.replace('$', "$$")
}

/// The reverse, for a command that is read back.
pub fn unescape_argument(argument: &str) -> String {
    argument.replace("$$", "$")
}

/// A random UUID (version 4) as text.
pub fn random_uuid() -> io::Result<String> {
    let mut bytes = [0_u8; 16];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let mut number = u128::from_be_bytes(bytes);
    let mut digits = [0_u8; 32];
    for digit in digits.iter_mut().rev() {
        *digit = b"0123456789abcdef"[(number & 15) as usize];
        number >>= 4;
    }
    let text = String::from_utf8_lossy(&digits);
    Ok(format!("{}-{}-{}-{}-{}", &text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &str, path: &str) {
        assert_eq!(unit_path(name), format!("{UNITS}{path}"));
        assert_eq!(unit_name(&unit_path(name)).as_deref(), Some(name));
    }

    #[test]
    fn unit_paths_are_those_of_systemd() {
        check("a-b.service", "a_2db_2eservice");
        check("1st.service", "_31st_2eservice");
        check("mount-s3-0.1.0-ab.service", "mount_2ds3_2d0_2e1_2e0_2dab_2eservice");
        check("é.service", "_c3_a9_2eservice");
        check("", "_");
        assert_eq!(unit_name("/org/freedesktop/systemd1/job/1"), None);
        assert_eq!(unit_name(&format!("{UNITS}a_2")), None);
        assert_eq!(unit_name(&format!("{UNITS}a_zz")), None);
    }

    #[test]
    fn dollars_come_through_unexpanded() {
        assert_eq!(escape_argument("--prefix=$HOME/${X}$$"), "--prefix=$$HOME/$${X}$$$$");
        assert_eq!(unescape_argument(&escape_argument("a$b$$c")), "a$b$$c");
    }

    #[test]
    fn uuids_are_random_and_look_like_uuids() {
        let (one, other) = (random_uuid().unwrap(), random_uuid().unwrap());
        assert_ne!(one, other);
        assert_eq!(one.split('-').map(str::len).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
        assert_eq!(one.as_bytes()[14], b'4');
    }
}
