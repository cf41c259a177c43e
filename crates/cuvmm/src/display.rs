//! Sizes, counts and tables for people: binary units, plurals, aligned columns.

use std::fmt;

const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// Digits up to which a size is shown exactly in a smaller unit rather than rounded in a larger one.
const MOST_DIGITS: u64 = 100_000;

/// Shows a number of bytes in binary units: `6 MiB`, `1.5 GiB`, `1538 MiB`, `5000 B`.
///
/// The value is exact if two decimals or five digits of a smaller unit are enough for that.
/// Otherwise it is rounded to two decimals of the largest unit, as in `138.88 GiB`. All errors and
/// statistics of this library show sizes so.
///
/// ```
/// use cuvmm::display::Bytes;
///
/// assert_eq!(Bytes(3 << 29).to_string(), "1.5 GiB");
/// assert_eq!(format!("{:>8}", Bytes(64 << 20)), "  64 MiB");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        let units = UNITS.iter().zip([1u32, 2, 3, 4, 5, 6]).rev();
        let mut fitting = units.filter(|(_, power)| bytes >> (10 * power) > 0);
        let Some((&largest, power)) = fitting.next() else {
            return f.pad(&format!("{bytes} B"));
        };
        let shift = 10 * power;
        let hundredths = u128::from(bytes) * 100;
        if hundredths.trailing_zeros() >= shift {
            let hundredths = hundredths >> shift;
            let (whole, rest) = (hundredths / 100, hundredths % 100);
            let text = format!("{whole}.{rest:02}");
            let text = text.trim_end_matches('0').trim_end_matches('.');
            return f.pad(&format!("{text} {largest}"));
        }
        // A smaller unit that divides it, with few digits.
        for (&unit, power) in fitting {
            let shift = 10 * power;
            if bytes.trailing_zeros() >= shift && bytes >> shift < MOST_DIGITS {
                return f.pad(&format!("{} {unit}", bytes >> shift));
            }
        }
        if bytes < MOST_DIGITS {
            return f.pad(&format!("{bytes} B"));
        }
        f.pad(&format!(
            "{:.2} {largest}",
            bytes as f64 / (1u64 << shift) as f64
        ))
    }
}

/// Shows a number with its noun, which takes an `s` for its plural: `1 block`, `2 blocks`.
#[derive(Clone, Copy, Debug)]
pub struct Count<T>(pub T, pub &'static str);

impl<T: fmt::Display + PartialEq + From<u8>> fmt::Display for Count<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(number, noun) = self;
        let plural = if *number == T::from(1) { "" } else { "s" };
        write!(f, "{number} {noun}{plural}")
    }
}

/// Shows the option that sets the device's memory, after an error with a figure of that memory, or
/// nothing if there is none.
pub(crate) struct SetBy(pub(crate) Option<&'static str>);

impl fmt::Display for SetBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(option) => write!(f, "; `{option}` sets the device's memory"),
            None => Ok(()),
        }
    }
}

/// Rows of text in columns: the first aligned to the left, the others to the right.
#[derive(Debug)]
pub(crate) struct Table<const COLUMNS: usize> {
    rows: Vec<[String; COLUMNS]>,
}

impl<const COLUMNS: usize> Table<COLUMNS> {
    pub(crate) fn new(header: [&str; COLUMNS]) -> Self {
        Self {
            rows: vec![header.map(str::to_owned)],
        }
    }

    pub(crate) fn row(&mut self, cells: [String; COLUMNS]) {
        self.rows.push(cells);
    }
}

impl<const COLUMNS: usize> fmt::Display for Table<COLUMNS> {
    /// Writes one line a row, the last one without a line break.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths: [usize; COLUMNS] = std::array::from_fn(|column| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or(0)
        });
        for (index, row) in self.rows.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
                match column {
                    0 => write!(f, "{cell:width$}")?,
                    _ => write!(f, "  {cell:>width$}")?,
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Bytes, Count, Table};

    #[test]
    fn one_of_a_kind_has_no_plural() {
        let shown = [0_u64, 1, 2].map(|number| Count(number, "block").to_string());
        assert_eq!(shown, ["0 blocks", "1 block", "2 blocks"]);
    }

    #[test]
    fn sizes_are_exact_where_that_is_short() {
        let shown = |bytes| Bytes(bytes).to_string();
        assert_eq!(shown(0), "0 B");
        assert_eq!(shown(1023), "1023 B");
        assert_eq!(shown(1024), "1 KiB");
        assert_eq!(shown(6 << 20), "6 MiB");
        assert_eq!(shown(3 << 29), "1.5 GiB");
        assert_eq!(shown(1538 << 20), "1538 MiB");
        assert_eq!(shown(5000), "5000 B");
        assert_eq!(shown((2 << 20) + 1), "2.00 MiB");
        assert_eq!(shown(149_123_456_789), "138.88 GiB");
        assert_eq!(shown(1 << 63), "8 EiB");
        assert_eq!(shown(u64::MAX), "16.00 EiB");
        assert_eq!(format!("{:>7}", Bytes(1 << 20)), "  1 MiB");
    }

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(["tenant", "in use"]);
        table.row(["a".into(), "2 GiB".into()]);
        table.row(["a long name".into(), "0 B".into()]);
        assert_eq!(
            table.to_string(),
            "tenant       in use\na             2 GiB\na long name     0 B"
        );
    }
}
