//! Processes that have files open beneath a path, found through `/proc`. Only link names are read, so a dead or unresponsive
//! file system cannot block the search. Processes in other mount namespaces use other paths and are not found.

use std::fs;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

/// Enough for an error message.
const MOST: usize = 10;

/// `name (process ID)` of each process found before the deadline. Reading `/proc` blocks on a process that is stuck in execve,
/// so the search runs on its own thread, which is abandoned at the deadline.
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
    fn a_process_with_an_open_file_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let _file = fs::File::create(directory.path().join("file")).unwrap();
        let found = holders(directory.path(), Instant::now() + Duration::from_mins(2));
        assert!(found[0].ends_with(&format!("({})", std::process::id())), "{found:?}");
    }

    #[test]
    fn an_unused_directory_has_no_holders_and_the_deadline_holds() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(holders(directory.path(), Instant::now() + Duration::from_millis(200)), [""; 0]);
    }
}
