//! Parsing of sizes on the command line and in plans, and sizes for people.

use cuvmm::display::Bytes;

/// The first letters of the units, each 1,024 or 1,000 times the unit before.
const UNITS: &str = "kmgtpe";

/// Parses a size of at least one byte.
///
/// # Errors
/// The message says what is wrong and how a size is written.
pub fn size(text: &str) -> Result<u64, String> {
    match bytes(text)? {
        0 => Err("a size is at least one byte".to_owned()),
        bytes => Ok(bytes),
    }
}

/// Parses a number of bytes, which may be zero: `4096`, `2 MiB`, `1.5 GiB`, `2MB`. Fractions of a
/// byte are truncated.
///
/// # Errors
/// The message says what is wrong and how a size is written.
pub fn bytes(text: &str) -> Result<u64, String> {
    read(text)
        .ok_or_else(|| "a size is a number of bytes, or like 512MiB or 8GiB".to_owned())?
        .ok_or_else(|| format!("a size is at most {} bytes, just under 16 EiB", u64::MAX))
}

/// Formats a size for people, as errors and statistics of the library do.
pub fn iec(bytes: u64) -> String {
    Bytes(bytes).to_string()
}

/// Parses a size. Returns `None` if the text is not a size, and `Some(None)` if the size does not
/// fit in 64 bits.
fn read(text: &str) -> Option<Option<u64>> {
    let text = text.trim();
    let end = text.find(|character: char| !character.is_ascii_digit() && character != '.');
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    let unit = factor(unit.trim_start())?;
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.len() + part.len() == 0 || !digits(part) {
        return None;
    }
    // Further digits of the fraction are worth less than a byte, even of the largest unit.
    let part = part.get(..part.len().min(19)).unwrap_or(part);
    let scale = 10_u128.pow(u32::try_from(part.len()).unwrap_or(0));
    let value = |digits: &str| match digits.trim_start_matches('0') {
        "" => Some(0),
        digits => digits.parse::<u128>().ok().filter(|_| digits.len() < 21),
    };
    let bytes = || {
        let whole = value(whole)?.checked_mul(unit)?;
        let part = value(part)?.checked_mul(unit)? / scale;
        u64::try_from(whole.checked_add(part)?).ok()
    };
    Some(bytes())
}

/// Returns the bytes of a unit: 1 for `B` or no unit, a power of 1,000 for `MB` or `M`, and of
/// 1,024 for `MiB` or `Mi`. Returns `None` for an unknown unit.
fn factor(unit: &str) -> Option<u128> {
    let unit = unit.to_ascii_lowercase();
    let unit = unit.strip_suffix('b').unwrap_or(&unit);
    if unit.is_empty() {
        return Some(1);
    }
    let (letter, base) = match unit.strip_suffix('i') {
        Some(letter) => (letter, 1024_u128),
        None => (unit, 1000),
    };
    let power = UNITS.find(letter).filter(|_| letter.len() == 1)?;
    Some(base.pow(u32::try_from(power + 1).ok()?))
}

#[cfg(test)]
mod tests {
    use super::{bytes, size};

    #[test]
    fn sizes_are_what_they_say() {
        for (text, expected) in [
            ("0", 0),
            ("4096", 4096),
            ("7B", 7),
            ("1.5 KiB", 1536),
            (" 2 MiB ", 2 << 20),
            ("2MB", 2_000_000),
            ("2m", 2_000_000),
            ("3 gib", 3 << 30),
            ("1Ti", 1 << 40),
            ("0.5EiB", 1 << 59),
            (".5k", 500),
            ("0.3KiB", 307),
            ("15EiB", 15 << 60),
            ("18446744073709551615", u64::MAX),
            ("00000000000000000000000001", 1),
            ("0.00000000000000000000000001 EiB", 0),
        ] {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        assert!(size("0").is_err() && size("0.2 B").is_err());
        assert_eq!(size("1"), Ok(1));
    }

    #[test]
    fn what_does_not_fit_64_bits_is_refused_and_not_cut() {
        for text in [
            "16EiB",
            "99999999999EiB",
            "18446744073709551616",
            "18446744073709551615.5 k",
            "999999999999999999999999999999999999999999999999999",
            "20000 PB",
        ] {
            let refused = bytes(text).unwrap_err();
            assert!(
                refused.contains("at most 18446744073709551615"),
                "{text}: {refused}"
            );
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in [
            "", " ", "MiB", "-1", "+1", "1e9", "1,5", "1.2.3", "1 MiBB", "1 iB", "1 ZiB", "NaN",
            "inf", "0x10", "1 M i B", "1_000", ".", "1 kmB", "\u{661}",
        ] {
            let refused = bytes(text).unwrap_err();
            assert!(refused.contains("512MiB"), "{text}: {refused}");
        }
    }
}
