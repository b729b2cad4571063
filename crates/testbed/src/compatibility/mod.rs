//! `make compatibility`: which programs work on a volume, beside s3fs and rclone, and which cases of pjdfstest. The results of a
//! run are kept as JSON; `page` writes docs/compatibility-programs.md from them.

mod file_systems;
pub mod page;
mod pjdfstest;
mod reasons;
mod results;
mod run;

pub use file_systems::ComparedFileSystem;
pub use pjdfstest::{CaseOutcome, PJDFSTEST_GROUPS};
pub use reasons::{PROGRAM_REASONS, reason_for_case};
pub use results::{CompatibilityResults, GROUPS, ProgramGroup, unexplained};
pub use run::{Selection, check, run};
