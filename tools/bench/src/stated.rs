//! Facts stated by tables of costs and recordings: the driver's version and the date.

use std::time::{SystemTime, UNIX_EPOCH};

use cuvmm::driver::DriverKind;
use cuvmm_command::drivers::Opened;

/// Returns the version of the GPU's driver, or of the stand-in.
pub(crate) fn driver_version(opened: &Opened) -> String {
    match opened.driver.kind() {
        DriverKind::Cuda => conformance::driver_version().unwrap_or_else(|| "unknown".to_owned()),
        kind => {
            let own = concat!("cuvmm ", env!("CARGO_PKG_VERSION"));
            format!("{} driver of {own}", kind.name())
        }
    }
}

/// Returns the date in UTC, like `2026-11-23`.
pub(crate) fn today() -> String {
    // A clock before 1970 is not set.
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    date(since.map_or(0, |since| since.as_secs() / 86_400))
}

/// Returns the date that is this many days after 1970-01-01.
fn date(days: u64) -> String {
    // Counted from 0000-03-01, so that a leap day is the last day of its year, in cycles of 400
    // years, which have 146,097 days.
    let days = days + 719_468;
    let (cycle, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    format!("{:04}-{month:02}-{day:02}", 400 * cycle + year + next)
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn every_day_follows_the_day_before() {
        let mut days = 0;
        for year in 1970..2500 {
            let leap = year % 400 == 0 || (year % 4 == 0 && year % 100 != 0);
            let february = 28 + u64::from(leap);
            let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
            for (month, length) in (1..).zip(lengths) {
                for day in 1..=length {
                    assert_eq!(date(days), format!("{year:04}-{month:02}-{day:02}"));
                    days += 1;
                }
            }
        }
    }
}
