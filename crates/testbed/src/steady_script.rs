//! What a Pod does all the time while something around its volume dies: read and compare, list, create small files and append to
//! one. It counts its errors and its longest pause outside of the volume, so that a test can read both at any time.

/// What the script does with the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SteadyAccess {
    Read,
    /// Each round also creates a file.
    Create,
    /// Each round also creates a file and appends a line to another one.
    CreateAndAppend,
}

/// The object that the script reads. It must exist before the script starts.
pub const SEED: &str = "seed";

/// The object that grows by one line with each round.
pub const APPENDED: &str = "appended";

/// Prints a report in the form of [`crate::steady_reader::ReaderReport::parse`], once there is one.
pub const SHOW_REPORT: &str = "cat /tmp/report /tmp/errors 2>/dev/null || true";

/// Prints what was read so far through a descriptor that stays open from the first round on: the beginning of the seed.
pub const SHOW_HELD: &str = "cat /tmp/held";

/// Lets the script end after the round that it is in, and waits for it.
pub const STOP: &str = "touch /tmp/stop; until [ -e /tmp/stopped ]; do sleep 0.1; done";

/// Lets the script's process end after the round that it is in: the container ends.
pub const END: &str = "touch /tmp/end /tmp/stop";

/// The object that a round creates. Its content is the number of the round.
pub fn created(round: u64) -> String {
    format!("written-{round}")
}

/// For `sh -c` of busybox.
pub fn steady_script(directory: &str, access: SteadyAccess) -> String {
    // Unlike the shell, cp(1) notices that close(2) fails.
    let create = format!("cp number {directory}/written-$round 2>>errors || note create");
    let append = format!("echo $round 2>>errors >>{directory}/{APPENDED} || note append");
    let write = match access {
        SteadyAccess::Read => ":".to_owned(),
        SteadyAccess::Create => create,
        SteadyAccess::CreateAndAppend => format!("{create}\n  {append}"),
    };
    format!(
        "cd /tmp
: >errors
: >held
cp {directory}/{SEED} expected
exec 3<{directory}/{SEED}
round=0
longest=0
note() {{ echo \"$1 in round $round\" >>errors; }}
# Hundredths of a second since the start of the machine.
clock() {{ read -r now rest </proc/uptime; now=${{now%.*}}${{now#*.}}; }}
until [ -e stop ]; do
  round=$((round + 1))
  clock
  begun=$now
  echo $round >number
  cat {directory}/{SEED} 2>>errors | cmp -s - expected || note read
  dd bs=16 count=1 <&3 >>held 2>part || {{ cat part >>errors; note 'read of the open file'; }}
  set -- {directory}/*
  case \" $* \" in *' {directory}/{SEED} '*) ;; *) note list ;; esac
  {write}
  clock
  took=$((now - begun))
  [ $took -le $longest ] || longest=$took
  printf '%s\\n%s0\\n' $round $longest >draft
  mv draft report
  sleep 0.1
done
touch stopped
[ -e end ] || exec sleep 100000
"
    )
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::steady_reader::ReaderReport;
    use crate::wait::wait_for;

    /// In a directory of its own instead of /tmp.
    #[track_caller]
    fn check(change: &str, expected: &[&str]) {
        let home = tempfile::tempdir().unwrap();
        let (data, own) = (home.path().join("data"), home.path().join("own"));
        fs::create_dir(&data).unwrap();
        fs::create_dir(&own).unwrap();
        fs::write(data.join(SEED), "0123456789abcdef0123456789abcdef").unwrap();
        let script = steady_script(data.to_str().unwrap(), SteadyAccess::CreateAndAppend)
            .replace("cd /tmp", &format!("cd {}", own.display()));
        let mut shell = Command::new("busybox").args(["sh", "-c", &script]).stdin(Stdio::null()).spawn().unwrap();
        let report = || {
            let text = ["report", "errors"].map(|it| fs::read_to_string(own.join(it)).unwrap_or_default()).concat();
            ReaderReport::parse(&text).unwrap_or_default()
        };
        wait_for("a round is done", || 0 < report().rounds);
        if !change.is_empty() {
            fs::remove_file(data.join(change)).unwrap();
        }
        let before = report().rounds;
        wait_for("rounds follow", || before + 1 < report().rounds);
        fs::write(own.join("end"), "").unwrap();
        fs::write(own.join("stop"), "").unwrap();
        shell.wait().unwrap();
        let report = report();
        for round in 1..=report.rounds {
            assert_eq!(fs::read_to_string(data.join(created(round))).unwrap(), format!("{round}\n"));
        }
        assert!(fs::read_to_string(own.join("held")).unwrap().starts_with("0123456789abcdef"));
        assert_eq!(report.errors.is_empty(), expected.is_empty(), "{report:?}");
        for words in expected {
            assert!(report.errors.iter().any(|it| it.contains(words)), "{words}: {report:?}");
        }
    }

    #[test]
    fn the_script_notes_errors_and_nothing_else() {
        check("", &[]);
        check(SEED, &["read in round", "list in round", "No such file"]);
    }
}
