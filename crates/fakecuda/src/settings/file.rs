//! The file of settings: TOML or JSON, by its name.

use std::path::Path;

/// Reads a file's entries as pairs of name and text.
pub(super) fn read(path: &str) -> Result<Vec<(String, String)>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let kind = Path::new(path).extension().and_then(|end| end.to_str());
    let table: serde_json::Map<String, serde_json::Value> = match kind {
        Some("toml") => toml::from_str(&text).map_err(|error| error.to_string())?,
        Some("json") => serde_json::from_str(&text).map_err(|error| error.to_string())?,
        _ => return Err("its name ends in neither .toml nor .json".to_owned()),
    };
    table
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
fn plain(value: &serde_json::Value) -> Option<String> {
    use serde_json::Value;
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
