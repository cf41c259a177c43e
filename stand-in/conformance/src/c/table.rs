//! Answers by name, as a file of lines with a tab between name and answer.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// The beginning of the reason of a difference that depends on the machine, and may be none.
const MACHINE: &str = "machine: ";

/// The answer that a recording lists for questions that are newer.
const NOT_ASKED: &str = "not asked";

/// Answers, by the name of the case and its part.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    lines: BTreeMap<String, String>,
}

impl Table {
    pub(crate) fn read(file: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(file)
            .map_err(|error| format!("{}: {error}", file.display()))?;
        let mut table = Self::default();
        table.add(&text);
        Ok(table)
    }

    /// Adds the lines of a text. A line that begins with `#` is a comment.
    pub(crate) fn add(&mut self, text: &str) {
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            if let Some((name, answer)) = line.split_once('\t') {
                let words: Vec<_> = answer.split_whitespace().collect();
                self.put(name, words.join(" "));
            }
        }
    }

    pub(crate) fn put(&mut self, name: &str, answer: String) {
        self.lines.insert(name.to_owned(), answer);
    }

    pub(crate) fn len(&self) -> usize {
        self.lines.len()
    }

    pub(crate) fn write(&self, file: &Path) -> Result<(), String> {
        std::fs::write(file, self.to_string())
            .map_err(|error| format!("{}: {error}", file.display()))
    }

    /// Returns a sentence for each answer that differs from the recorded one, unless a known
    /// difference covers its name, and for each known difference that is none any more. A question that
    /// the recording lists as not asked has no difference.
    pub(crate) fn differences(&self, recorded: &Self, known: &Self, filter: &str) -> Vec<String> {
        let mut differences = Vec::new();
        let mut used = vec![false; known.lines.len()];
        let mut differ = |name: &str, sentence: String| {
            let mut allowed = false;
            for ((listed, _), used) in known.lines.iter().zip(&mut used) {
                if covers(listed, name) {
                    *used = true;
                    allowed = true;
                }
            }
            if !allowed {
                differences.push(sentence);
            }
        };
        let later = recorded.lines.iter();
        let later: Vec<_> = later
            .filter(|(_, answer)| *answer == NOT_ASKED)
            .map(|(listed, _)| listed)
            .collect();
        for (name, answer) in &self.lines {
            match recorded.lines.get(name) {
                None if later.iter().any(|listed| covers(listed, name)) => (),
                None => differ(name, format!("{name}: {answer}, not recorded")),
                Some(there) if there != answer => {
                    differ(name, format!("{name}: {answer}, recorded: {there}"));
                }
                Some(_) => (),
            }
        }
        for (name, answer) in &recorded.lines {
            let asked = name.contains(filter) && answer != NOT_ASKED;
            if asked && !self.lines.contains_key(name) {
                differ(name, format!("{name}: no answer, recorded: {answer}"));
            }
        }
        let listed = known.lines.iter().zip(&used);
        let stale = listed.filter(|((name, reason), used)| {
            let was_asked = !later.iter().any(|listed| covers(listed, name));
            !**used && was_asked && name.contains(filter) && !reason.starts_with(MACHINE)
        });
        let stale: Vec<_> = stale
            .map(|((name, _), _)| format!("{name}: listed as different and is not"))
            .collect();
        differences.extend(stale);
        differences
    }
}

/// Returns `true` if a listed name, which may end in `*`, covers a name.
fn covers(listed: &str, name: &str) -> bool {
    match listed.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == listed,
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, answer) in &self.lines {
            writeln!(f, "{name}\t{answer}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(text: &str) -> Table {
        let mut table = Table::default();
        table.add(text);
        table
    }

    #[test]
    fn differences_are_listed_once_and_known_ones_are_not() {
        let now = table("a\t1\nb\t2 \nc.x\t3\n");
        let then = table("# of a GPU\na\t1\nb\t3\nc.x\t4\nd\t5\n");
        let all = now.differences(&then, &Table::default(), "");
        let names: Vec<_> = all.iter().filter_map(|one| one.split(':').next()).collect();
        assert_eq!(names, ["b", "c.x", "d"]);
        let known = table("b\treason\nc.*\treason\nd\treason\n");
        assert!(now.differences(&then, &known, "").is_empty());
        let stale = now.differences(&now, &table("a\treason\n"), "");
        assert_eq!(stale, ["a: listed as different and is not"]);
        let newer = table("c.*\tnot asked\na\t1\nb\t2\n");
        assert!(now.differences(&newer, &Table::default(), "").is_empty());
        let newer = table("c.*\tnot asked\na\t1\n");
        let all = now.differences(&newer, &Table::default(), "");
        assert_eq!(all, ["b: 2, not recorded"]);
    }
}
