//! Who uses files beneath a path, as far as `/proc` shows it to us. Only names are read: no file system is asked, so a dead or hung
//! one cannot stop us. Processes of other mount namespaces know the files by other names and are not found.

use std::fs;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

/// More than these are not read by anybody.
const MOST: usize = 10;

/// `name (process id)`, each process once; what was found until the deadline. The kernel lets us wait for a process that is
/// stuck in execve, so the search has a thread of its own, which is left behind.
pub fn holders(path: &Path, deadline: Instant) -> Vec<String> {
    let (sender, found) = mpsc::channel();
    let path = path.to_owned();
    let search = move || {
        let Ok(entries) = fs::read_dir("/proc") else { return };
        let processes = entries.filter_map(|it| it.ok()?.file_name().into_string().ok());
        for process in processes.filter(|it| it.bytes().all(|it| it.is_ascii_digit())) {
            if holds(&process, &path) && sender.send(described(&process)).is_err() {
                return;
            }
        }
    };
    if thread::Builder::new().name("holders".to_owned()).spawn(search).is_err() {
        return Vec::new();
    }
    let next = || found.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok();
    std::iter::from_fn(next).take(MOST).collect()
}

fn described(process: &str) -> String {
    let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    format!("{} ({process})", name.trim_end())
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
    use std::time::Duration;

    use super::*;

    #[test]
    fn whoever_has_a_file_open_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let _file = fs::File::create(directory.path().join("file")).unwrap();
        let found = holders(directory.path(), Instant::now() + Duration::from_mins(2));
        assert!(found[0].ends_with(&format!("({})", std::process::id())), "{found:?}");
    }

    #[test]
    fn nobody_is_found_where_nobody_is_and_never_later_than_asked_for() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(holders(directory.path(), Instant::now() + Duration::from_millis(200)), [""; 0]);
    }
}
