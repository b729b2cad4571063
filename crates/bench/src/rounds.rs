//! What the three publish benchmarks share: rounds that alternate with the reference, and the end of the programs.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use rustix::process::Signal;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::process::Process;
use s3csi_testbed::wait::SOON;

use crate::publisher::ratio;
use crate::run::{Options, Progress, Thoroughness};
use crate::statistics::Samples;
use crate::verdicts::Verdicts;

const SHARED_LIMIT_MILLISECONDS: f64 = 20.0;
const FIRST_LIMIT: f64 = 1.2;
const START_LIMIT_MILLISECONDS: f64 = 15.0;

/// What is measured in one half of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundPart {
    /// The calls that kubelet makes.
    Publish,
    /// What they are compared with.
    Reference,
}

pub fn count(options: &Options) -> usize {
    options.repetitions.unwrap_or(match options.thoroughness {
        Thoroughness::Quick => 8,
        Thoroughness::Full => 200,
    })
}

/// Alternates which part comes first, so that neither always runs right after the other.
pub fn alternate(
    rounds: usize,
    progress: &Progress,
    mut measure: impl FnMut(usize, RoundPart) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    for round in 1..=rounds {
        let parts = if round.is_multiple_of(2) {
            [RoundPart::Publish, RoundPart::Reference]
        } else {
            [RoundPart::Reference, RoundPart::Publish]
        };
        for part in parts {
            measure(round, part)?;
        }
        if round.is_multiple_of((rounds / 10).max(1)) {
            progress.say(&format!("round {round} of {rounds}"));
        }
    }
    Ok(())
}

/// A new one each time: the kernel knows nothing of an earlier mount there.
pub fn mount_point(fixture: &Fixture, kind: &str, round: usize) -> anyhow::Result<PathBuf> {
    let path = fixture.path("mounts").join(format!("{kind}-{round}"));
    fs::create_dir_all(&path).with_context(|| format!("failed to make {}", path.display()))?;
    Ok(path)
}

/// Ends a program as Kubernetes does.
pub fn stop(process: &Process) -> anyhow::Result<()> {
    process.signal(Signal::TERM);
    let status = process.wait(SOON).with_context(|| format!("{} does not end", process.name()))?;
    ensure!(status.success(), "{} ended with {status}", process.name());
    Ok(())
}

/// The targets of publishes that share a source, and of the first one of each source.
pub fn verdicts(first: (&str, &Samples), shared: &Samples, engine: &Samples) -> Verdicts {
    let mut verdicts = Verdicts::new(["measured"]);
    verdicts.add(&format!("shared publish, p99 below {SHARED_LIMIT_MILLISECONDS} ms"), [shared.percentile(99)], |it| {
        it < SHARED_LIMIT_MILLISECONDS
    });
    let (name, first) = first;
    verdicts.add(&format!("{name}, p50 at most {FIRST_LIMIT} × engine start"), [ratio(first, engine)], |it| {
        it <= FIRST_LIMIT
    });
    verdicts.add(&format!("engine start, p50 at most {START_LIMIT_MILLISECONDS} ms"), [engine.median()], |it| {
        it <= START_LIMIT_MILLISECONDS
    });
    verdicts
}
