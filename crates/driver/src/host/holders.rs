//! Who uses files beneath a path, as far as `/proc` shows it to us. Only names are read: no file system is asked, so a dead or hung
//! one cannot stop us. Processes of other mount namespaces know the files by other names and are not found.

use std::fs;
use std::path::Path;

/// More than these are not read by anybody.
const MOST: usize = 10;

/// `name (process id)`, each process once.
pub fn holders(path: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let processes = entries.filter_map(|it| it.ok()?.file_name().into_string().ok());
    processes
        .filter(|it| it.bytes().all(|it| it.is_ascii_digit()) && holds(it, path))
        .map(|it| {
            let name = fs::read_to_string(format!("/proc/{it}/comm")).unwrap_or_default();
            format!("{} ({it})", name.trim_end())
        })
        .take(MOST)
        .collect()
}

fn holds(process: &str, path: &Path) -> bool {
    let is_beneath = |link: &Path| fs::read_link(link).is_ok_and(|it| it.starts_with(path));
    let directory = Path::new("/proc").join(process);
    let open = fs::read_dir(directory.join("fd")).into_iter().flatten().flatten();
    is_beneath(&directory.join("cwd"))
        || is_beneath(&directory.join("root"))
        || open.into_iter().any(|it| is_beneath(&it.path()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_a_file_open_is_found() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(holders(directory.path()), [""; 0]);
        let _file = fs::File::create(directory.path().join("file")).unwrap();
        let found = holders(directory.path());
        assert!(found[0].ends_with(&format!("({})", std::process::id())), "{found:?}");
    }
}
