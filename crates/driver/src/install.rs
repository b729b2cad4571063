//! Installs a program atomically: a start at any time, also after a power failure, runs the old or the complete new version.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    #[error("{path:?} is not a file")]
    NotAFile { path: PathBuf },

    #[error("failed to {action} {path:?}")]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

impl InstallError {
    /// An error constructor for `map_err`.
    fn io(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        move |cause| Self::Io { action, path: path.to_owned(), cause }
    }
}

const MODE: u32 = 0o755;

/// Copies `program` into `directory` under this name and returns its path.
pub fn engine(program: &Path, directory: &Path, name: &str) -> Result<PathBuf, InstallError> {
    let mut source = File::open(program).map_err(InstallError::io("open", program))?;
    if !source.metadata().map_err(InstallError::io("open", program))?.is_file() {
        return Err(InstallError::NotAFile { path: program.to_owned() });
    }
    fs::create_dir_all(directory).map_err(InstallError::io("create directory", directory))?;
    let target = directory.join(name);
    // The same name for all attempts, so that a leftover of a crash is overwritten.
    let temporary = directory.join(format!(".{name}.new"));
    let written = write(&mut source, &temporary).and_then(|()| fs::rename(&temporary, &target));
    if let Err(cause) = written {
        // Best effort: the first error is the one to report.
        let _ = fs::remove_file(&temporary);
        return Err(InstallError::io("write", &target)(cause));
    }
    let synced = File::open(directory).and_then(|it| it.sync_all());
    synced.map_err(InstallError::io("write", &target))?;
    Ok(target)
}

fn write(source: &mut File, path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = File::options().write(true).create_new(true).open(path)?;
    io::copy(source, &mut file)?;
    // Independent of the umask.
    file.set_permissions(Permissions::from_mode(MODE))?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(directory).unwrap().map(|it| it.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_program_is_installed_executable_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("program");
        fs::write(&program, "new").unwrap();
        let bin = directory.path().join("a/bin");
        let installed = engine(&program, &bin, "mount-s3").unwrap();
        assert_eq!(installed, bin.join("mount-s3"));
        assert_eq!(fs::read_to_string(&installed).unwrap(), "new");
        assert_eq!(fs::metadata(&installed).unwrap().permissions().mode() & 0o7777, MODE);
        assert_eq!(names(&bin), ["mount-s3"]);
    }

    #[test]
    fn a_running_program_and_a_leftover_of_a_crash_are_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let bin = directory.path().join("bin");
        let installed = engine(Path::new("/bin/sleep"), &bin, "mount-s3").unwrap();
        let mut running = std::process::Command::new(&installed).arg("60").spawn().unwrap();
        fs::write(bin.join(".mount-s3.new"), "half").unwrap();
        engine(Path::new("/bin/true"), &bin, "mount-s3").unwrap();
        running.kill().unwrap();
        running.wait().unwrap();
        assert!(std::process::Command::new(&installed).status().unwrap().success());
        assert_eq!(names(&bin), ["mount-s3"]);
    }

    #[test]
    fn an_error_leaves_nothing_and_names_the_path() {
        let directory = tempfile::tempdir().unwrap();
        let bin = directory.path().join("bin");
        // A directory in the program's place cannot be renamed over.
        fs::create_dir_all(bin.join("mount-s3/x")).unwrap();
        let error = engine(Path::new("/bin/true"), &bin, "mount-s3").unwrap_err();
        assert!(
            matches!(&error, InstallError::Io { action: "write", path, .. } if *path == bin.join("mount-s3")),
            "{error}"
        );
        assert_eq!(names(&bin), ["mount-s3"]);
        assert!(matches!(engine(&bin, &bin, "x"), Err(InstallError::NotAFile { .. })));
        assert!(matches!(
            engine(&directory.path().join("no"), &bin, "x"),
            Err(InstallError::Io { action: "open", .. })
        ));
        assert_eq!(names(&bin), ["mount-s3"]);
    }
}
