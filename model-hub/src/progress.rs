//! How far a fetch is: a bar on a terminal, a line in the log every few seconds elsewhere.

use std::convert::Infallible;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A line is written this often, where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// A bar is moved this often.
const BAR_EVERY: Duration = Duration::from_millis(200);

/// Bytes of all files of a fetch.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    done: AtomicU64,
    total: AtomicU64,
}

impl Progress {
    /// More files.
    pub(crate) fn expect(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    fn is_whole(&self) -> bool {
        let (done, total) = self.look();
        done == total
    }

    fn look(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }
}

/// What one file adds to it.
#[derive(Debug)]
pub(crate) struct Share {
    progress: Arc<Progress>,
    counted: u64,
}

impl Share {
    pub(crate) fn of(progress: &Arc<Progress>) -> Self {
        Self {
            progress: Arc::clone(progress),
            counted: 0,
        }
    }

    /// So many bytes of the file are there.
    pub(crate) fn set(&mut self, bytes: u64) {
        // Wrapping, as atomics do: a file that begins again takes away what it had added.
        self.progress
            .done
            .fetch_add(bytes.wrapping_sub(self.counted), Ordering::Relaxed);
        self.counted = bytes;
    }
}

/// Shows progress until it is dropped.
pub(crate) async fn show(progress: &Progress, what: String) -> Infallible {
    // What is in the cache needs no show.
    while progress.is_whole() {
        tokio::time::sleep(BAR_EVERY).await;
    }
    if std::io::stderr().is_terminal() {
        bar(progress, what).await
    } else {
        lines(progress, &what).await
    }
}

/// Takes the bar away when the fetch ends or is dropped.
struct Bar(ProgressBar);

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

async fn bar(progress: &Progress, what: String) -> Infallible {
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
    let template = "{msg} {wide_bar} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";
    let bar =
        Bar(bar.with_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())));
    bar.0.set_message(what);
    let (first, _) = progress.look();
    bar.0.set_position(first);
    bar.0.reset_eta();
    loop {
        let (done, total) = progress.look();
        bar.0.set_length(total);
        bar.0.set_position(done);
        tokio::time::sleep(BAR_EVERY).await;
    }
}

async fn lines(progress: &Progress, what: &str) -> Infallible {
    let mut before = progress.look().0;
    loop {
        tokio::time::sleep(LINE_EVERY).await;
        if progress.is_whole() {
            continue;
        }
        let (done, total) = progress.look();
        let line = line(before, done, total, LINE_EVERY);
        before = done;
        tracing::info!("fetching {what}: {line}");
    }
}

/// `1.0 GiB of 4.0 GiB, 256.0 MiB/s, 12 s left`, from what was there `interval` ago.
fn line(before: u64, done: u64, total: u64, interval: Duration) -> String {
    let speed = done.saturating_sub(before) / interval.as_secs().max(1);
    let rest = total.saturating_sub(done).checked_div(speed);
    let left = rest.map_or_else(String::new, |seconds| format!(", {seconds} s left"));
    format!("{} of {}, {}/s{left}", size(done), size(total), size(speed))
}

fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1_024 {
        return format!("{bytes} B");
    }
    let power = ((63 - bytes.leading_zeros()) / 10).min(4);
    let tenths = (u128::from(bytes) * 10) >> (10 * power);
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[power as usize - 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_tell_bytes_speed_and_time() {
        let gib = 1 << 30;
        assert_eq!(
            line(0, 5 * gib, 20 * gib, LINE_EVERY),
            "5.0 GiB of 20.0 GiB, 1.0 GiB/s, 15 s left"
        );
        assert_eq!(line(7, 7, 1_536, LINE_EVERY), "7 B of 1.5 KiB, 0 B/s");
        assert_eq!(size(u64::MAX), "16777215.9 TiB");
    }

    #[test]
    fn files_that_begin_again_take_their_share_back() {
        let progress = Arc::new(Progress::default());
        let (mut one, mut other) = (Share::of(&progress), Share::of(&progress));
        one.set(10);
        other.set(5);
        one.set(2);
        assert_eq!(progress.look().0, 7);
    }
}
