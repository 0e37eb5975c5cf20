//! Where a server says the time of an answer went: the values of `Server-Timing` headers.

/// Name of the time of all phases together, which is no phase.
pub const TOTAL: &str = "total";
/// Name of the time to the first token, which is no phase either.
pub const FIRST: &str = "ttft";

/// A phase and its time in milliseconds.
pub type Phase = (String, f64);

/// Reads `name;dur=1.5;desc="words", other;dur=2`: names with their times, in order. What has no time, or none that is a number
/// at least 0, is left out.
pub fn parse(text: &str) -> Vec<Phase> {
    let metrics = outside_quotes(text, ',');
    metrics.iter().filter_map(|metric| one(metric)).collect()
}

/// Reads the comment of an event stream that tells the same: `server-timing: ..`.
pub fn of_comment(comment: &[u8]) -> Option<Vec<Phase>> {
    let text = std::str::from_utf8(comment).ok()?;
    let (name, value) = text.split_once(':')?;
    name.trim().eq_ignore_ascii_case("server-timing").then(|| parse(value))
}

fn one(metric: &str) -> Option<Phase> {
    let parts = outside_quotes(metric, ';');
    let (name, parameters) = parts.split_first()?;
    let time = parameters.iter().find_map(|parameter| {
        let (key, value) = parameter.split_once('=')?;
        key.trim()
            .eq_ignore_ascii_case("dur")
            .then(|| value.trim().trim_matches('"'))
    })?;
    let time = time
        .parse::<f64>()
        .ok()
        .filter(|time| time.is_finite() && *time >= 0.0)?;
    let name = name.trim();
    (!name.is_empty()).then(|| (name.to_owned(), time))
}

/// The parts between separators that are not in quotes.
fn outside_quotes(text: &str, separator: char) -> Vec<&str> {
    let mut quoted = false;
    text.split(|c| {
        quoted ^= c == '"';
        c == separator && !quoted
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_times_in_order() {
        let text =
            " queue;dur=1.5, prefill ; desc=\"a, b; dur=9\" ; DUR=20 ,miss,bad;dur=x,less;dur=-1, total;dur=\"30\"";
        let expected = [("queue", 1.5), ("prefill", 20.0), ("total", 30.0)];
        assert_eq!(parse(text), expected.map(|(name, ms)| (name.to_owned(), ms)));
        assert_eq!(parse(""), []);
    }

    #[test]
    fn comments_of_streams() {
        let found = of_comment(b"server-timing: a;dur=1");
        assert_eq!(found, Some(vec![("a".to_owned(), 1.0)]));
        assert_eq!(of_comment(b"keep-alive"), None);
        assert_eq!(of_comment(b"other: a;dur=1"), None);
        assert_eq!(of_comment(b"\xff: a;dur=1"), None);
    }
}
