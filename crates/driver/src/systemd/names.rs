//! systemd's escaping rules: unit names as object paths, and arguments that must not be expanded.

const UNITS: &str = "/org/freedesktop/systemd1/unit/";

/// The object path of a unit. All bytes but ASCII letters, and digits after the first byte, are escaped as `_` and two hex
/// digits.
pub fn unit_path(name: &str) -> String {
    let mut path = String::from(UNITS);
    if name.is_empty() {
        path.push('_');
    }
    for (index, byte) in name.bytes().enumerate() {
        if byte.is_ascii_alphabetic() || (index > 0 && byte.is_ascii_digit()) {
            path.push(char::from(byte));
        } else {
            push_encoded(&mut path, byte);
        }
    }
    path
}

/// The name of the unit with this object path.
pub fn unit_name(path: &str) -> Option<String> {
    let name = path.strip_prefix(UNITS)?;
    if name == "_" { Some(String::new()) } else { decode(name) }
}

/// systemd expands `$VAR` and `${VAR}` in arguments; `$$` is one `$`.
pub fn escape_argument(argument: &str) -> String {
    argument.replace('$', "$$")
}

/// The reverse of [`escape_argument`].
pub fn unescape_argument(argument: &str) -> String {
    argument.replace("$$", "$")
}

/// Whether a reload of systemd changes the argument: 252 inserts backslashes before these characters, 257 doubles dollar signs.
/// So such a command is recorded a second time, see [`recorded_command`].
pub fn is_fragile(argument: &str) -> bool {
    argument.contains(['$', ';'])
}

const COMMAND: &str = "S3CSI_COMMAND=";

/// An environment variable with the command of a unit, in characters that survive a reload.
pub fn recorded_command(command: &[String]) -> String {
    let words: Vec<String> = command.iter().map(|it| encode(it)).collect();
    format!("{COMMAND}{}", words.join(","))
}

/// The command in a variable of [`recorded_command`]; `None` for another variable.
pub fn recorded_command_in(variable: &str) -> Option<Vec<String>> {
    variable.strip_prefix(COMMAND)?.split(',').map(decode).collect()
}

/// All bytes but letters, digits and a few others are escaped as `_` and two hex digits.
fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'/' | b':' | b'=') {
            encoded.push(char::from(byte));
        } else {
            push_encoded(&mut encoded, byte);
        }
    }
    encoded
}

fn push_encoded(text: &mut String, byte: u8) {
    text.push('_');
    text.extend([byte >> 4, byte & 15].map(|it| char::from_digit(it.into(), 16).unwrap_or('0')));
}

fn decode(text: &str) -> Option<String> {
    let mut rest = text.as_bytes();
    let mut plain = Vec::with_capacity(rest.len());
    let digit = |it: u8| char::from(it).to_digit(16).and_then(|it| u8::try_from(it).ok());
    while let [first, tail @ ..] = rest {
        rest = match (first, tail) {
            (b'_', [high, low, after @ ..]) => {
                plain.push(digit(*high)? << 4 | digit(*low)?);
                after
            }
            (b'_', _) => return None,
            _ => {
                plain.push(*first);
                tail
            }
        };
    }
    String::from_utf8(plain).ok()
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
    fn dollar_signs_are_not_expanded() {
        assert_eq!(escape_argument("--prefix=$HOME/${X}$$"), "--prefix=$$HOME/$${X}$$$$");
        assert_eq!(unescape_argument(&escape_argument("a$b$$c")), "a$b$$c");
    }

    #[test]
    fn a_command_is_recorded_in_plain_characters() {
        let command = ["/bin/mount-s3", "--prefix=a;b $c/_,é", "", "logs"].map(str::to_owned);
        let recorded = recorded_command(&command);
        assert_eq!(recorded, "S3CSI_COMMAND=/bin/mount-s3,--prefix=a_3bb_20_24c/_5f_2c_c3_a9,,logs");
        assert_eq!(recorded_command_in(&recorded).as_deref(), Some(command.as_slice()));
        for other in ["AWS_REGION=a", "S3CSI_COMMAND=a_", "S3CSI_COMMAND=_zz", "S3CSI_COMMAND=_ff"] {
            assert_eq!(recorded_command_in(other), None, "{other}");
        }
    }
}
