//! `make demo`: a tour of the product on this machine. Every process and every mount is real; no cluster is needed.

mod screen;
mod tour;

use std::time::Instant;

use anyhow::Context as _;

use crate::fixture::Fixture;
use screen::Screen;
pub use tour::Ending;

/// Runs the tour and proves that nothing is left of it.
pub fn run(ending: Ending) -> anyhow::Result<()> {
    let start = Instant::now();
    let screen = Screen::new();
    screen.title("s3csi: S3 buckets as Kubernetes volumes. A tour on this machine, without a cluster.");
    let fixture = Fixture::prepare("demo")?;
    let toured = tour::walk(&fixture, &screen, ending);
    if toured.is_err() {
        screen.note(&format!("the logs of all parts are in {}", fixture.logs().display()));
    }
    let outcome = screen.step("nothing left", || {
        // Said after looking: no mount, process, socket or credential file of this tour.
        fixture.finish().context("the tour left something behind")?;
        Ok("no mount, no process, no socket, no credential file".to_owned())
    });
    toured.and(outcome)?;
    screen.title(&format!(
        "Done in {:.1} s. Next: README.md says how to try it with your own bucket.",
        start.elapsed().as_secs_f64()
    ));
    Ok(())
}
