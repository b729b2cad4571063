//! The form that mount(8) uses for lines of fstab: `mount-s3 BUCKET DIRECTORY -o name,name=value`.

use std::ffi::OsString;

/// Options of fstab that are meant for mount(8), systemd or the kernel and say nothing about S3.
const MEANT_FOR_OTHERS: [&str; 17] = [
    "defaults", "rw", "auto", "noauto", "nofail", "_netdev", "user", "nouser", "users", "owner", "group", "exec",
    "suid", "dev", "nosuid", "nodev", "noatime",
];

/// Replaces every `-o list` by the long flags it stands for.
pub fn expand(words: Vec<OsString>) -> Result<Vec<OsString>, String> {
    let mut expanded = Vec::with_capacity(words.len());
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        if word == "--" {
            expanded.push(word);
            expanded.extend(words);
            break;
        }
        if word != "-o" {
            expanded.push(word);
            continue;
        }
        let list = words.next().ok_or("-o needs a list of options: -o name,name=value")?;
        let list = list.to_str().ok_or("the options after -o are not valid UTF-8")?;
        for option in split(list)? {
            if let Some(flag) = flag(&option)? {
                expanded.push(flag.into());
            }
        }
    }
    Ok(expanded)
}

/// A comma or a backslash inside a value is written with a backslash in front of it.
fn split(list: &str) -> Result<Vec<String>, String> {
    let mut options = vec![String::new()];
    let mut characters = list.chars();
    while let Some(character) = characters.next() {
        match character {
            ',' => options.push(String::new()),
            '\\' => {
                let escaped = characters.next().ok_or("the options after -o end with a single backslash")?;
                options.last_mut().expect("the list is never empty").push(escaped);
            }
            other => options.last_mut().expect("the list is never empty").push(other),
        }
    }
    options.retain(|it| !it.is_empty());
    Ok(options)
}

fn flag(option: &str) -> Result<Option<String>, String> {
    if option.starts_with('-') {
        return Err(format!("the option {option:?} after -o must be written without dashes"));
    }
    if MEANT_FOR_OTHERS.contains(&option) || option.starts_with("x-") || option.starts_with("comment=") {
        return Ok(None);
    }
    let name = if option == "ro" { "read-only" } else { option };
    Ok(Some(format!("--{name}")))
}
