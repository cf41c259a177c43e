//! A parser of timestamps: a date and a time as in RFC 3339, with two liberties of the traces. A
//! space may stand between date and time, and a timestamp without an offset is in UTC.

const SECOND: i128 = 1_000_000_000;

/// Parses a timestamp like `2023-11-16 18:15:46.6805900` or `2024-05-10T00:00:00+02:00`.
///
/// Returns the nanoseconds since 1970, UTC, or `None` if the text is no timestamp. A second has up
/// to nine decimals. Second 60 of a minute, a leap second, is the first of the next minute, as in
/// POSIX time.
pub(crate) fn parse(text: &[u8]) -> Option<i128> {
    let (date_time, rest) = text.split_at_checked("2023-11-16 18:15:46".len())?;
    let (date, time) = date_time.split_at_checked("2023-11-16".len())?;
    let &[b' ' | b'T' | b't', ref time @ ..] = time else {
        return None;
    };
    let (nanos, offset) = decimals(rest)?;
    let seconds = days(date)? * 86_400 + seconds(time)? - offset_seconds(offset)?;
    Some(i128::from(seconds) * SECOND + i128::from(nanos))
}

/// Returns the days since 1970-01-01.
fn days(date: &[u8]) -> Option<i64> {
    let &[y1, y2, y3, y4, b'-', m1, m2, b'-', d1, d2] = date else {
        return None;
    };
    let (year, month, day) = (
        number(&[y1, y2, y3, y4])?,
        number(&[m1, m2])?,
        number(&[d1, d2])?,
    );
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let last = match month {
        2 => 28 + i64::from(leap),
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    if !(1..=last).contains(&day) {
        return None;
    }
    // Years that begin in March have their leap day at the end. 719,468 days are between 0000-03-01
    // and 1970-01-01.
    let (year, month) = match month {
        3.. => (year, month - 3),
        _ => (year - 1, month + 9),
    };
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    Some(365 * year + leap_days + (153 * month + 2) / 5 + day - 1 - 719_468)
}

/// Returns the seconds since midnight.
fn seconds(time: &[u8]) -> Option<i64> {
    let &[h1, h2, b':', m1, m2, b':', s1, s2] = time else {
        return None;
    };
    let second = number(&[s1, s2]).filter(|&second| second <= 60)?;
    Some(minutes([h1, h2], [m1, m2])? * 60 + second)
}

/// Returns the seconds by which local time is ahead of UTC.
fn offset_seconds(offset: &[u8]) -> Option<i64> {
    match *offset {
        [] | [b'Z' | b'z'] => Some(0),
        [b'+', h1, h2, b':', m1, m2] => Some(minutes([h1, h2], [m1, m2])? * 60),
        [b'-', h1, h2, b':', m1, m2] => Some(minutes([h1, h2], [m1, m2])? * -60),
        _ => None,
    }
}

/// Returns hours, below 24, and minutes as minutes.
fn minutes(hours: [u8; 2], minutes: [u8; 2]) -> Option<i64> {
    let (hours, minutes) = (number(&hours)?, number(&minutes)?);
    (hours < 24 && minutes < 60).then_some(hours * 60 + minutes)
}

/// Splits a point and up to nine digits, if any, from the rest. Returns their nanoseconds.
fn decimals(text: &[u8]) -> Option<(i64, &[u8])> {
    let Some(text) = text.strip_prefix(b".") else {
        return Some((0, text));
    };
    let count = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (digits, rest) = text.split_at_checked(count)?;
    let missing = u32::try_from(count)
        .ok()
        .and_then(|count| 9_u32.checked_sub(count))?;
    Some((number(digits)? * 10_i64.pow(missing), rest))
}

/// Parses up to nine digits.
fn number(digits: &[u8]) -> Option<i64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{SECOND, days, parse};

    fn seconds(text: &str) -> i128 {
        let nanos = parse(text.as_bytes()).expect(text);
        assert_eq!(nanos % SECOND, 0, "{text}");
        nanos / SECOND
    }

    #[test]
    fn known_instants() {
        for (text, expected) in [
            ("1970-01-01 00:00:00", 0),
            ("1969-12-31T23:59:59Z", -1),
            ("2000-02-29t12:00:00z", 951_825_600),
            ("2001-09-09 01:46:40", 1_000_000_000),
            ("2038-01-19 03:14:08", 1 << 31),
            ("2100-03-01 00:00:00", 4_107_542_400),
            ("0000-01-01 00:00:00", -62_167_219_200),
            ("9999-12-31 23:59:59", 253_402_300_799),
            ("2016-12-31 23:59:60", 1_483_228_800),
            ("2024-05-10 00:00:00+02:00", 1_715_292_000),
            ("2024-05-09 16:30:00-05:30", 1_715_292_000),
            ("1970-01-01 00:00:00+23:59", -86_340),
        ] {
            assert_eq!(seconds(text), expected, "{text}");
        }
    }

    #[test]
    fn decimals_are_nanoseconds() {
        for (decimals, expected) in [
            (".6", 600_000_000),
            (".6805900", 680_590_000),
            (".000000001Z", 1),
            (".999999999+00:00", 999_999_999),
        ] {
            let text = format!("1970-01-01 00:00:00{decimals}");
            assert_eq!(parse(text.as_bytes()), Some(expected), "{text}");
        }
        // Fractions count forwards before 1970 too.
        let before = parse(b"1969-12-31 23:59:59.25");
        assert_eq!(before, Some(-750_000_000));
    }

    /// Counts days through four centuries, after which the calendar repeats itself.
    #[test]
    fn every_day_follows_the_day_before() {
        let mut next = days(b"1899-12-31").unwrap() + 1;
        for year in 1900..2300 {
            let leap = year % 400 == 0 || (year % 4 == 0 && year % 100 != 0);
            let lengths = [
                31,
                28 + i32::from(leap),
                31,
                30,
                31,
                30,
                31,
                31,
                30,
                31,
                30,
                31,
            ];
            for (month, length) in (1..).zip(lengths) {
                for day in 0..=32 {
                    let date = format!("{year:04}-{month:02}-{day:02}");
                    let expected = (1..=length).contains(&day).then_some(next);
                    assert_eq!(days(date.as_bytes()), expected, "{date}");
                    next += i64::from(expected.is_some());
                }
            }
        }
        assert_eq!(next - days(b"1900-01-01").unwrap(), 146_097);
    }

    #[test]
    fn what_is_out_of_range_or_cut_is_refused() {
        for text in [
            "",
            "2023-11-16",
            "2023-11-16 18:15",
            "2023-11-16 18:15:4",
            "2023-11-16_18:15:46",
            "2023-00-16 18:15:46",
            "2023-13-16 18:15:46",
            "2023-11-00 18:15:46",
            "2023-11-31 18:15:46",
            "2023-02-29 18:15:46",
            "1900-02-29 18:15:46",
            "2023-11-16 24:00:00",
            "2023-11-16 18:60:00",
            "2023-11-16 18:15:61",
            "2023-11-16 18:15:46.",
            "2023-11-16 18:15:46.Z",
            "2023-11-16 18:15:46.1234567890",
            "2023-11-16 18:15:46.5 ",
            "2023-11-16 18:15:46+24:00",
            "2023-11-16 18:15:46+02:60",
            "2023-11-16 18:15:46+0200",
            "2023-11-16 18:15:46+02",
            "2023-11-16 18:15:46ZZ",
            "+023-11-16 18:15:46",
            "2023-11-16 18:15:+6",
            "2023-1\u{661}-16 18:15:46",
        ] {
            assert_eq!(parse(text.as_bytes()), None, "{text}");
        }
    }
}
