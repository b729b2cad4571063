//! How the tour looks: one line per step, with its duration.

use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

pub struct Screen {
    has_colours: bool,
}

const GREEN: &str = "\x1b[32m";
const RED: &str = "\x1b[31m";
const BOLD: &str = "\x1b[1m";
const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

impl Screen {
    pub fn new() -> Self {
        Self { has_colours: std::io::stdout().is_terminal() }
    }

    pub fn title(&self, text: &str) {
        println!("\n{}\n", self.painted(BOLD, text));
    }

    pub fn note(&self, text: &str) {
        println!("  {}", self.painted(DIM, text));
    }

    /// Does something and says in one line what came of it and how long it took.
    pub fn step(&self, name: &str, work: impl FnOnce() -> anyhow::Result<String>) -> anyhow::Result<()> {
        if self.has_colours {
            print!("  … {name}");
            let _ = std::io::stdout().flush();
        }
        let start = Instant::now();
        let outcome = work();
        let took = duration(start.elapsed());
        let (mark, colour, text) = match &outcome {
            Ok(text) => ("✓", GREEN, text.clone()),
            Err(error) => ("✗", RED, format!("{error:#}")),
        };
        if self.has_colours {
            // Back to the start of the line and over what stands there.
            print!("\r\x1b[K");
        }
        println!("  {} {name:<15} {took:>8}   {text}", self.painted(colour, mark));
        outcome.map(drop)
    }

    fn painted(&self, colour: &str, text: &str) -> String {
        if self.has_colours { format!("{colour}{text}{PLAIN}") } else { text.to_owned() }
    }
}

fn duration(took: Duration) -> String {
    if took < Duration::from_secs(1) {
        format!("{} ms", took.as_millis())
    } else {
        format!("{:.1} s", took.as_secs_f64())
    }
}
