//! What was measured, for people and for programs.

mod csv;
mod html;
mod pages;
mod plots;
mod table;

pub use csv::write_csv;
pub use html::{Page, run_page};
pub use pages::{interference_page, sweep_page};
pub use plots::{Drawing, Point};
pub use table::{comparison, interference, run, sweep};

/// A report that cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The file.
    #[error("{argument} {path}: {why}")]
    File {
        /// The argument that named it.
        argument: &'static str,
        /// The file.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// A plot. Its data are numbers, so this is a fault of the program.
    #[error("a plot cannot be drawn: {0}")]
    Plot(String),
}
