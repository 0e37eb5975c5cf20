//! Dates for chat templates: the parts of `strftime` they use, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
];

struct Date {
    year: i64,
    /// 1 to 12.
    month: usize,
    /// 1 to 31.
    day: i64,
    /// 1 to 366.
    day_of_year: i64,
    /// 0 is Monday.
    weekday: usize,
    hour: i64,
    minute: i64,
    second: i64,
}

impl Date {
    fn new(now: SystemTime) -> Option<Self> {
        let seconds = match now.duration_since(UNIX_EPOCH) {
            Ok(since) => i64::try_from(since.as_secs()).ok()?,
            Err(before) => -i64::try_from(before.duration().as_secs()).ok()?,
        };
        let (days, second_of_day) = (seconds.div_euclid(86400), seconds.rem_euclid(86400));
        let (mut year, mut left) = (1970, days);
        // Whole 400 year cycles at once, so that the loop is short for any date.
        year += 400 * left.div_euclid(146_097);
        left = left.rem_euclid(146_097);
        while left >= year_days(year) {
            left -= year_days(year);
            year += 1;
        }
        let day_of_year = left + 1;
        let mut month = 0;
        while left >= month_days(year, month) {
            left -= month_days(year, month);
            month += 1;
        }
        Some(Self {
            year,
            month: month + 1,
            day: left + 1,
            day_of_year,
            // 1 January 1970 was a Thursday.
            weekday: usize::try_from((days + 3).rem_euclid(7)).ok()?,
            hour: second_of_day / 3600,
            minute: second_of_day / 60 % 60,
            second: second_of_day % 60,
        })
    }
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

fn year_days(year: i64) -> i64 {
    if is_leap(year) { 366 } else { 365 }
}

/// `month` from 0.
fn month_days(year: i64, month: usize) -> i64 {
    match month {
        1 => 28 + i64::from(is_leap(year)),
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

/// Formats `now` in UTC. The error names a directive that is not known.
pub(crate) fn strftime(format: &str, now: SystemTime) -> Result<String, String> {
    let date = Date::new(now).ok_or("the current time is out of range")?;
    let (month, weekday) = (MONTHS[date.month - 1], DAYS[date.weekday]);
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        // `%-d` is `%d` without the leading zero.
        let mut directive = characters.next();
        let padded = directive != Some('-');
        if !padded {
            directive = characters.next();
        }
        let two = |number: i64| {
            if padded {
                format!("{number:02}")
            } else {
                number.to_string()
            }
        };
        let hour12 = (date.hour + 11) % 12 + 1;
        out.push_str(&match directive {
            Some('Y') => date.year.to_string(),
            Some('y') => two(date.year.rem_euclid(100)),
            Some('m') => two(date.month as i64),
            Some('B') => month.to_string(),
            Some('b' | 'h') => month[..3].to_string(),
            Some('d') => two(date.day),
            Some('j') if padded => format!("{:03}", date.day_of_year),
            Some('j') => date.day_of_year.to_string(),
            Some('A') => weekday.to_string(),
            Some('a') => weekday[..3].to_string(),
            Some('H') => two(date.hour),
            Some('I') => two(hour12),
            Some('M') => two(date.minute),
            Some('S') => two(date.second),
            Some('p') => if date.hour < 12 { "AM" } else { "PM" }.to_string(),
            Some('F') => format!("{}-{:02}-{:02}", date.year, date.month, date.day),
            Some('T') => format!("{:02}:{:02}:{:02}", date.hour, date.minute, date.second),
            Some('Z') => "UTC".to_string(),
            Some('z') => "+0000".to_string(),
            Some('%') => "%".to_string(),
            Some(other) => return Err(format!("strftime_now: %{other} in {format:?} is not known")),
            None => return Err(format!("strftime_now: {format:?} ends inside a directive")),
        });
    }
    Ok(out)
}
