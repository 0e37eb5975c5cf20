//! Prints the configuration reference: `cargo run --release -p config --example reference > docs/configuration.md`.
#![allow(clippy::print_stdout, reason = "printing is what this program is for")]

fn main() -> Result<(), config::ConfigError> {
    print!("{}", config::reference()?);
    Ok(())
}
