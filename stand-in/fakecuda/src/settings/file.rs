//! The file of settings: TOML or JSON, by its ending.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;

/// The longest file that is read: a device like `/dev/zero` has no end.
const LONGEST: u64 = 1 << 20;

/// The entries of a file in order, duplicate names included.
struct Entries(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Table;

        impl<'de> Visitor<'de> for Table {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("names with values")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }

        from.deserialize_map(Table)
    }
}

pub(super) fn text(path: &str) -> Result<String, String> {
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(LONGEST + 1).read_to_string(&mut text))
        .map_err(|error| error.to_string())?;
    if text.len() as u64 > LONGEST {
        return Err("it has more than 1 MiB".to_owned());
    }
    Ok(text)
}

/// Reads a file's entries as pairs of name and text.
pub(super) fn read(path: &str) -> Result<Vec<(String, String)>, String> {
    let kind = Path::new(path).extension().and_then(|end| end.to_str());
    let Entries(entries) = match kind {
        Some("toml") => toml::from_str(&text(path)?).map_err(|error| error.to_string())?,
        Some("json") => serde_json::from_str(&text(path)?).map_err(|error| error.to_string())?,
        _ => return Err("its name ends in neither .toml nor .json".to_owned()),
    };
    entries
        .into_iter()
        .map(|(name, value)| match plain(&value) {
            Some(text) => Ok((name, text)),
            None => Err(format!(
                "{name} is neither text, a number, a truth value nor a list of these"
            )),
        })
        .collect()
}

/// Returns the text of a value, as a variable would have it.
fn plain(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(yes) => Some(u8::from(*yes).to_string()),
        Value::Array(parts) => {
            let parts: Option<Vec<_>> = parts.iter().map(plain).collect();
            Some(parts?.join(","))
        }
        Value::Null | Value::Object(_) => None,
    }
}
