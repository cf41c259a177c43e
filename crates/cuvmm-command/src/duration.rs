//! Parsing of durations on the command line and in plans.

use std::time::Duration;

/// The longest duration of an option or a wait, about a year. A time so far from now is always
/// representable.
pub const LONGEST: Duration = Duration::from_secs(10_000 * 3_600);

/// Parses an option's duration, which is not zero: seconds, or a number and a unit, such as
/// `500ms`.
///
/// # Errors
/// The message says how a duration is written.
pub fn duration(text: &str) -> Result<Duration, String> {
    let seconds = || parse(&format!("{text} s"));
    match parse(text).or_else(seconds) {
        Some(time) if time.is_zero() => Err("a duration is more than 0".to_owned()),
        Some(time) if time > LONGEST => Err("a duration is at most 10000h".to_owned()),
        Some(time) => Ok(time),
        None => Err("a duration is a number of seconds, or like 500ms, 5s, 2min or 1h".to_owned()),
    }
}

const SECOND: u128 = 1_000_000_000;

/// Parses a decimal number and a unit: `ns`, `us`, `ms`, `s`, `min` or `h`. Fractions of a
/// nanosecond are cut off.
///
/// Returns `None` if the text is no time, or a time that `Duration` cannot hold.
pub fn parse(text: &str) -> Option<Duration> {
    let text = text.trim();
    let at = text.find(|character: char| !character.is_ascii_digit() && character != '.')?;
    let (number, unit) = text.split_at_checked(at)?;
    let nanos = match unit.trim_start() {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => SECOND,
        "min" => 60 * SECOND,
        "h" => 3_600 * SECOND,
        _ => return None,
    };
    // A number needs digits, and has at most one point.
    let (whole, part) = match number.split_once('.') {
        Some((whole, digits)) => {
            let scale = 10_u128.checked_pow(u32::try_from(digits.len()).ok()?)?;
            let part = u128::from(digits.parse::<u64>().ok()?);
            (whole, nanos * part / scale)
        }
        None => (number, 0),
    };
    let whole = u128::from(whole.parse::<u64>().ok()?);
    let total = nanos * whole + part;
    let seconds = u64::try_from(total / SECOND).ok()?;
    Some(Duration::new(seconds, u32::try_from(total % SECOND).ok()?))
}

#[cfg(test)]
mod tests {
    use super::{duration, parse};
    use std::time::Duration;

    #[test]
    fn an_option_without_a_unit_is_in_seconds() {
        for (text, millis) in [
            ("5", 5_000),
            ("0.5", 500),
            ("5s", 5_000),
            (" 250 ms ", 250),
            ("1.5min", 90_000),
            ("1h", 3_600_000),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "soon", "-1", "1e3", "5 days", ".5", "NaN"] {
            let refused = duration(text).unwrap_err();
            assert!(refused.contains("like 500ms"), "{text}: {refused}");
        }
        assert!(duration("0").unwrap_err().contains("more than 0"));
        assert!(duration("10001h").unwrap_err().contains("at most 10000h"));
        assert_eq!(duration("10000h"), Ok(super::LONGEST));
    }

    #[test]
    fn a_time_is_a_number_and_a_unit() {
        for (text, nanos) in [
            ("500 ms", 500_000_000),
            ("500ms", 500_000_000),
            (" 7 ns ", 7),
            ("1.5 us", 1_500),
            ("0 s", 0),
            ("0.000000001 s", 1),
            ("1.0000000019 s", 1_000_000_001),
            ("0.5 min", 30_000_000_000),
            ("2 h", 7_200_000_000_000),
        ] {
            assert_eq!(parse(text), Some(Duration::from_nanos(nanos)), "{text}");
        }
        let most = Duration::from_secs(u64::MAX);
        assert_eq!(parse("18446744073709551615 s"), Some(most));
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for text in [
            "",
            "5",
            "ms",
            "soon",
            "-1 s",
            "+1 s",
            ". s",
            ".5 s",
            "5. s",
            "1.2.3 s",
            "1e3 s",
            "5 days",
            "5 MS",
            "5 s 3 ms",
            "18446744073709551616 s",
            "307445734561825861 min",
            "0.00000000000000000000000000000000000000001 h",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
