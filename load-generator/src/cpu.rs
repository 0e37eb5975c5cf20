//! CPU time of processes, from the kernel's books.

use std::time::Duration;

/// Ticks of the kernel's books in a second, on every architecture that this runs on.
const TICKS_PER_S: f64 = 100.0;

/// CPU time that a process has had; none where the system does not say.
pub fn time_of(process: Option<u32>) -> Option<Duration> {
    let name = process.map_or_else(|| "self".to_owned(), |id| id.to_string());
    parse(&std::fs::read_to_string(format!("/proc/{name}/stat")).ok()?)
}

fn parse(stat: &str) -> Option<Duration> {
    // The program's name stands in parentheses and may hold anything; user and system time are fields 14 and 15.
    let after_name = stat.get(stat.rfind(')')? + 1..)?;
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    let ticks = |field: usize| fields.get(field - 3)?.parse::<f64>().ok();
    Duration::try_from_secs_f64((ticks(14)? + ticks(15)?) / TICKS_PER_S).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_behind_any_name() {
        let stat = "12 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 250 50 13 14 20 0 4 0";
        assert_eq!(parse(stat), Some(Duration::from_secs(3)));
        assert_eq!(parse("12 (a"), None);
        assert_eq!(parse("12 (a) S 1"), None);
    }
}
