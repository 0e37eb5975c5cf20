//! Prints the reference of metrics: `cargo run --release -p integration-tests --example metrics_reference > docs/metrics.md`.
#![allow(clippy::print_stdout, reason = "printing is what this program is for")]

fn main() {
    print!("{}", integration_tests::measures::reference());
}
