//! The text form of costs: one line for each cost. Parsing the text gives the same costs back.
//!
//! ```text
//! # microseconds; by size as MiB:microseconds, or as MiB:low/usual/high
//! about an H300, driver 999
//! reserve 2:1.5 1024:2
//! map 2:0.4/0.9/1.6
//! launch 2.8
//! ```
//!
//! A `#` begins a comment. A name that is left out keeps its default.

use std::fmt;
use std::str::FromStr;

use super::{Costs, Curve};

/// The reason why a text is not a table of costs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
#[non_exhaustive]
pub struct ParseCostsError {
    /// The line number, from 1.
    pub line: usize,
    /// A description of the error.
    pub what: String,
}

enum Entry<'a> {
    Words(&'a mut String),
    BySize(&'a mut Curve),
    Flat(&'a mut f64),
}

/// Generates writing and parsing from one list of names, so that both cover all names.
macro_rules! entries {
    (words: $($words:ident)+; by_size: $($curve:ident)+; flat: $($flat:ident)+;) => {
        impl fmt::Display for Costs {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                $(writeln!(f, "{} {}", stringify!($words), plain(&self.$words))?;)+
                $(writeln!(f, "{}{}", stringify!($curve), self.$curve)?;)+
                $(writeln!(f, "{} {}", stringify!($flat), self.$flat)?;)+
                Ok(())
            }
        }

        impl Costs {
            fn entry(&mut self, name: &str) -> Option<Entry<'_>> {
                match name {
                    $(stringify!($words) => Some(Entry::Words(&mut self.$words)),)+
                    $(stringify!($curve) => Some(Entry::BySize(&mut self.$curve)),)+
                    $(stringify!($flat) => Some(Entry::Flat(&mut self.$flat)),)+
                    _ => None,
                }
            }

            pub(super) fn curves(&mut self) -> Vec<&mut Curve> {
                vec![$(&mut self.$curve),+]
            }
        }
    };
}

entries! {
    words: about;
    by_size: reserve address_free create_warm create_cold busy release map unmap set_access
        set_access_cold set_access_peer alloc free host_copy fill device_copy;
    flat: memory_mib warm_for_us launch pool memory_info event_record query wait_event synchronize other;
}

impl fmt::Display for Curve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut points = self.0.iter();
        points.try_for_each(|(mib, [low, usual, high])| match low < high {
            true => write!(f, " {mib}:{low}/{usual}/{high}"),
            false => write!(f, " {mib}:{usual}"),
        })
    }
}

fn plain(words: &str) -> String {
    let kept = words
        .split(['#', '\n', '\r'])
        .flat_map(str::split_whitespace);
    kept.collect::<Vec<_>>().join(" ")
}

impl FromStr for Costs {
    type Err = ParseCostsError;

    fn from_str(text: &str) -> Result<Self, ParseCostsError> {
        let mut costs = Self::default();
        // The text does not say where the default costs were measured.
        costs.about.clear();
        costs.read(text)?;
        Ok(costs)
    }
}

impl Costs {
    /// Replaces the costs that a text gives.
    pub(super) fn read(&mut self, text: &str) -> Result<(), ParseCostsError> {
        let mut seen: Vec<&str> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let wrong = |what| ParseCostsError {
                line: index + 1,
                what,
            };
            let written = line.split('#').next().unwrap_or_default();
            let mut words = written.split_whitespace();
            let Some(name) = words.next() else { continue };
            if seen.contains(&name) {
                return Err(wrong(format!("{name} is given twice")));
            }
            seen.push(name);
            match self.entry(name) {
                Some(Entry::Words(about)) => *about = words.collect::<Vec<_>>().join(" "),
                Some(Entry::BySize(curve)) => *curve = points(words).map_err(wrong)?,
                Some(Entry::Flat(cost)) => {
                    let word = words.next().unwrap_or_default();
                    *cost = number(word).map_err(wrong)?;
                    if let Some(more) = words.next() {
                        return Err(wrong(format!(
                            "{name} takes one number, found {more:?} too"
                        )));
                    }
                }
                None => return Err(wrong(format!("no call is named {name:?}"))),
            }
        }
        Ok(())
    }
}

fn points<'a>(words: impl Iterator<Item = &'a str>) -> Result<Curve, String> {
    let mut points: Vec<(f64, [f64; 3])> = Vec::new();
    for word in words {
        let Some((mib, microseconds)) = word.split_once(':') else {
            return Err(format!("{word:?} is not MiB:microseconds"));
        };
        let costs = microseconds.split('/').map(number);
        let cost = match *costs.collect::<Result<Vec<_>, _>>()? {
            [cost] => [cost; 3],
            [low, usual, high] if low <= usual && usual <= high => [low, usual, high],
            _ => return Err(format!("{word:?} is neither one cost nor low/usual/high")),
        };
        let mib = number(mib)?;
        if points.last().is_some_and(|&(before, _)| before >= mib) {
            return Err(format!("the sizes do not grow at {word:?}"));
        }
        points.push((mib, cost));
    }
    Ok(Curve(points))
}

fn number(word: &str) -> Result<f64, String> {
    match word.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err(format!("{word:?} is not a number from 0 up")),
    }
}

#[cfg(test)]
mod tests {
    use super::{Costs, Curve};

    #[test]
    fn what_was_written_reads_back() {
        let odd = Costs {
            release: Curve::new(&[]),
            map: Curve::flat(0.1),
            unmap: Curve::new(&[(0.003_906_25, 1.0 / 3.0), (2.0, 1e-7), (1e9, 5e12)]),
            busy: [
                (2.0, [0.0, 0.0, 0.1]),
                (4.0, [1.0; 3]),
                (8.0, [1.0, 2.5, 3.0]),
            ]
            .into_iter()
            .collect(),
            launch: 0.1 + 0.2,
            about: "an H300, driver 1.2".to_owned(),
            ..Costs::default()
        };
        for costs in [Costs::default(), Costs::free_of_charge(), odd] {
            assert_eq!(costs.to_string().parse(), Ok(costs));
        }
        let long = Costs {
            about: "an H300 #7\nlaunch 1".to_owned(),
            ..Costs::default()
        };
        let read: Costs = long.to_string().parse().unwrap();
        assert_eq!(read.about, "an H300 7 launch 1");
        assert_eq!(read.launch, Costs::default().launch);
    }

    #[test]
    fn comments_blank_lines_and_what_is_left_out() {
        let text = "# an H300\n\nlaunch 1.5 # half\n  map 2:1 4:3\nabout  an H300 # or so\n";
        let costs: Costs = text.parse().unwrap();
        let expected = Costs {
            launch: 1.5,
            map: Curve::new(&[(2.0, 1.0), (4.0, 3.0)]),
            about: "an H300".to_owned(),
            ..Costs::default()
        };
        assert_eq!(costs, expected);
        let unsigned = Costs {
            about: String::new(),
            ..Costs::default()
        };
        assert_eq!("".parse(), Ok(unsigned));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, line, word) in [
            ("launch 1\nmalloc 2", 2, "malloc"),
            ("launch", 1, "not a number"),
            ("launch -1", 1, "\"-1\""),
            ("launch NaN", 1, "\"NaN\""),
            ("launch 1 2", 1, "\"2\""),
            ("launch 1\n\nlaunch 1", 3, "twice"),
            ("map 2", 1, "MiB:microseconds"),
            ("map 2:inf", 1, "\"inf\""),
            ("map 4:1 2:1", 1, "do not grow"),
            ("map 2:1/2", 1, "low/usual/high"),
            ("map 2:1/3/2", 1, "low/usual/high"),
            ("map 2:1/2/", 1, "\"\""),
        ] {
            let error = text.parse::<Costs>().unwrap_err();
            assert_eq!(error.line, line, "{text:?}");
            assert!(error.what.contains(word), "{text:?}: {error}");
        }
    }
}
