//! Tells how far the loading of a model is: a bar on a terminal, lines in the log elsewhere.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use model::LoadProgress;
use runtime::clock::Clock;

/// Time between two lines of the log.
const BETWEEN_LINES: Duration = Duration::from_secs(5);

/// Where progress is shown.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    began: Instant,
    told: Instant,
}

impl Progress {
    pub(crate) fn new() -> Self {
        let now = Clock.now();
        Self {
            bar: stderr().is_terminal().then(|| ProgressBar::new(0).with_style(style())),
            began: now,
            told: now,
        }
    }

    /// Shows how far it is.
    pub(crate) fn show(&mut self, progress: LoadProgress) {
        let LoadProgress { done, total } = progress;
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
            return;
        }
        let now = Clock.now();
        if now - self.told >= BETWEEN_LINES {
            self.told = now;
            let seconds = (now - self.began).as_secs();
            tracing::info!(done_bytes = done, total_bytes = total, seconds, "loading the model");
        }
    }

    /// Takes the bar away and says how long it took.
    pub(crate) fn end(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let seconds = (Clock.now() - self.began).as_secs_f64();
        tracing::info!(seconds, "the model is loaded");
    }
}

fn style() -> ProgressStyle {
    let template = "loading the model {wide_bar} {bytes} of {total_bytes} in {elapsed}";
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
