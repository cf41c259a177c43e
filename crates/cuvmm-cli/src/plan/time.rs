//! The parser of times like `500 ms`.

use std::time::Duration;

/// Nanoseconds in a second.
const SECOND: u128 = 1_000_000_000;

/// Parses a decimal number and a unit: `ns`, `us`, `ms`, `s`, `min` or `h`. Parts of a nanosecond
/// are cut off.
///
/// Returns `None` if the text is no time, or a time that `Duration` cannot hold.
pub(super) fn parse(text: &str) -> Option<Duration> {
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
    // No digits are no number, and neither is a second point.
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
    use super::parse;
    use std::time::Duration;

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
