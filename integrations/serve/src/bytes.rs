//! Text as tokens, one per byte. Other tokens are shown as numbers. This suits weights from a seed;
//! a real model needs the tokenizer that it was trained with.

pub(crate) fn encode(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Returns bytes as text, and other tokens in brackets.
pub(crate) fn decode(tokens: &[u32]) -> String {
    let mut text = String::new();
    for run in tokens.chunk_by(|one, other| (*one < 256) == (*other < 256)) {
        let bytes: Result<Vec<u8>, _> = run.iter().map(|&token| u8::try_from(token)).collect();
        match bytes {
            Ok(bytes) => text += &String::from_utf8_lossy(&bytes),
            Err(_) => text.extend(run.iter().map(|token| format!("[{token}]"))),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_comes_back_and_other_tokens_are_shown() {
        assert_eq!(decode(&encode("grün, 緑")), "grün, 緑");
        assert_eq!(decode(&[72, 105, 256, 8191, 33]), "Hi[256][8191]!");
        assert_eq!(decode(&[0xff]), "\u{fffd}");
    }
}
