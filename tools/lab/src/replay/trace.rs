//! The parser of request traces, in the CSV format of the Azure LLM inference traces.
//!
//! A header names the columns `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`, in any order and
//! possibly among other columns. Each line after it is one request. Lines end in LF or CRLF; empty
//! lines are skipped. A timestamp is a date and a time with up to nine decimals of a second, in
//! UTC unless it has an offset like `+02:00`.
//!
//! Counts must fit in 32 bits, and a request has at least one token of context. Zero generated
//! tokens are valid: such a request ends when its context is read. Rows may be out of order; the
//! caller sorts them.
//!
//! This module parses the bytes of one trace. It does not open files and does not know models, so
//! that a fuzz target can use it alone.

use std::fmt;

use super::instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// The arrival in nanoseconds since 1970, UTC.
    pub(crate) arrival_ns: i128,
    /// Tokens of context, at least 1.
    pub(crate) context: u32,
    /// Tokens to generate.
    pub(crate) generated: u32,
}

#[derive(Debug)]
pub(crate) struct TraceError {
    /// The line number, counted from 1 with empty lines included.
    line: usize,
    what: String,
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.what)
    }
}

impl std::error::Error for TraceError {}

const TIMESTAMP: &str = "TIMESTAMP";
const CONTEXT: &str = "ContextTokens";
const GENERATED: &str = "GeneratedTokens";

struct Columns {
    timestamp: usize,
    context: usize,
    generated: usize,
    /// The number of fields of the header, which every line must have.
    count: usize,
}

/// Parses a whole trace. The rows are in the order of the lines.
///
/// # Errors
/// The first line that breaks the format of the [module](self), or a trace without a request.
pub(crate) fn read(bytes: &[u8]) -> Result<Vec<Row>, TraceError> {
    // Quotes have no meaning in these files. With quoting, a stray quote would make the rest of the
    // file one field, and the error would name the wrong line.
    let mut reader = csv::ReaderBuilder::new()
        .has_headers(false)
        .flexible(true)
        .quoting(false)
        .from_reader(bytes);
    let mut record = csv::ByteRecord::new();
    let mut columns = None;
    let mut rows = Vec::new();
    loop {
        let start = reader.position().byte();
        let at_line = |what| TraceError {
            line: line_of(bytes, start),
            what,
        };
        match reader.read_byte_record(&mut record) {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => return Err(at_line(error.to_string())),
        }
        match &columns {
            None => columns = Some(header(&record).map_err(at_line)?),
            Some(columns) => rows.push(row(&record, columns).map_err(at_line)?),
        }
    }
    let at_start = |what| Err(TraceError { line: 1, what });
    if columns.is_none() {
        return at_start(format!(
            "the file is empty; a trace begins with {TIMESTAMP},{CONTEXT},{GENERATED}"
        ));
    }
    if rows.is_empty() {
        return at_start("no request follows the header".to_owned());
    }
    Ok(rows)
}

/// Returns the number of the first non-empty line at or after an offset.
///
/// The line count of the CSV reader is off by one after CRLF and ignores empty lines. This is
/// called once, for the line with the error.
fn line_of(bytes: &[u8], offset: u64) -> usize {
    let offset = usize::try_from(offset)
        .unwrap_or(usize::MAX)
        .min(bytes.len());
    let blank = bytes[offset..]
        .iter()
        .take_while(|byte| matches!(byte, b'\r' | b'\n'))
        .count();
    let before = &bytes[..offset + blank];
    let lf = before.iter().filter(|&&byte| byte == b'\n').count();
    let lone_cr = before
        .windows(2)
        .filter(|pair| pair[0] == b'\r' && pair[1] != b'\n')
        .count()
        + usize::from(before.last() == Some(&b'\r'));
    1 + lf + lone_cr
}

fn header(record: &csv::ByteRecord) -> Result<Columns, String> {
    let find = |name: &str| {
        let mut found = record
            .iter()
            .enumerate()
            .filter(|(_, field)| field.trim_ascii() == name.as_bytes());
        match (found.next(), found.next()) {
            (Some((at, _)), None) => Ok(at),
            (Some(_), Some(_)) => Err(format!("the header names {name} twice")),
            (None, _) => Err(format!(
                "the header has no column {name}; it is {}",
                shown(&record.iter().collect::<Vec<_>>().join(&b','))
            )),
        }
    };
    Ok(Columns {
        timestamp: find(TIMESTAMP)?,
        context: find(CONTEXT)?,
        generated: find(GENERATED)?,
        count: record.len(),
    })
}

fn row(record: &csv::ByteRecord, columns: &Columns) -> Result<Row, String> {
    if record.len() != columns.count {
        return Err(format!(
            "has {} fields where the header has {}",
            record.len(),
            columns.count
        ));
    }
    let field = |at: usize| record.get(at).unwrap_or_default().trim_ascii();
    let context = count(CONTEXT, field(columns.context))?;
    if context == 0 {
        return Err(format!(
            "{CONTEXT} is 0; a request has at least one token of context"
        ));
    }
    Ok(Row {
        arrival_ns: arrival(field(columns.timestamp))?,
        context,
        generated: count(GENERATED, field(columns.generated))?,
    })
}

fn count(name: &str, field: &[u8]) -> Result<u32, String> {
    let digits = !field.is_empty() && field.iter().all(u8::is_ascii_digit);
    match std::str::from_utf8(field).map(str::parse) {
        Ok(Ok(count)) if digits => Ok(count),
        _ if digits => Err(format!(
            "{name} is {}; the most is {}",
            shown(field),
            u32::MAX
        )),
        _ => Err(format!(
            "{name} is {}, which is not a whole number",
            shown(field)
        )),
    }
}

fn arrival(field: &[u8]) -> Result<i128, String> {
    instant::parse(field).ok_or_else(|| {
        let shown = shown(field);
        format!(
            "{TIMESTAMP} is {shown}, which is not a date and a time like 2023-11-16 18:15:46.6805900"
        )
    })
}

/// Formats bytes of the file for an error message, as one short line for any content.
fn shown(bytes: &[u8]) -> String {
    const MOST: usize = 48;
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(MOST)]);
    let more = if bytes.len() > MOST { "..." } else { "" };
    format!("{text:?}{more}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

    fn error(text: &str) -> String {
        read(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn reads_lf_and_crlf_and_a_last_line_without_an_end() {
        let lines = [
            HEADER,
            "2023-11-16 18:15:46.6805900,374,44",
            "2023-11-16 18:15:50.9951690,396,109",
        ];
        let lf = read(lines.join("\n").as_bytes()).unwrap();
        let crlf = read(lines.join("\r\n").as_bytes()).unwrap();
        assert_eq!(lf, crlf);
        assert_eq!(lf.len(), 2);
        assert_eq!((lf[0].context, lf[0].generated), (374, 44));
        assert_eq!(lf[1].arrival_ns - lf[0].arrival_ns, 4_314_579_000);
        assert_eq!(lf[0].arrival_ns % 1_000_000_000, 680_590_000);
    }

    #[test]
    fn columns_may_stand_in_any_order_behind_a_byte_order_mark() {
        let text = "\u{feff}GeneratedTokens,x,TIMESTAMP,ContextTokens\n7,?,2024-05-10 00:00:00.009930+02:00,5\n";
        let rows = read(text.as_bytes()).unwrap();
        assert_eq!((rows[0].context, rows[0].generated), (5, 7));
        let utc = read(format!("{HEADER}\n2024-05-09T22:00:00.00993Z,5,7").as_bytes()).unwrap();
        assert_eq!(rows[0].arrival_ns, utc[0].arrival_ns);
    }

    #[test]
    fn an_answer_may_be_empty_but_a_prompt_may_not() {
        let zero = read(format!("{HEADER}\n2023-11-16 18:15:46,1,0").as_bytes()).unwrap();
        assert_eq!(zero[0].generated, 0);
        assert!(
            error(&format!("{HEADER}\n2023-11-16 18:15:46,0,1")).contains("ContextTokens is 0")
        );
    }

    #[test]
    fn errors_name_the_line_whatever_ends_it() {
        for end in ["\n", "\r\n", "\r"] {
            let good = "2023-11-16 18:15:46.6805900,374,44";
            let text = [
                HEADER,
                "",
                good,
                "",
                "",
                good,
                "2023-11-16 18:15:46,12,x",
                good,
            ]
            .join(end);
            let said = error(&text);
            assert_eq!(
                said, "line 7: GeneratedTokens is \"x\", which is not a whole number",
                "{end:?}"
            );
        }
    }

    #[test]
    fn errors_say_what_is_wrong() {
        let at = "2023-11-16 18:15:46.6805900";
        for (text, expected) in [
            (String::new(), "line 1: the file is empty"),
            (HEADER.to_owned(), "line 1: no request follows the header"),
            (
                "a,b,c\n1,2,3".to_owned(),
                "line 1: the header has no column TIMESTAMP; it is \"a,b,c\"",
            ),
            (
                format!("{HEADER},TIMESTAMP\n"),
                "line 1: the header names TIMESTAMP twice",
            ),
            (
                format!("{HEADER}\n{at},1"),
                "line 2: has 2 fields where the header has 3",
            ),
            (
                format!("{HEADER}\n{at},1,2,3"),
                "line 2: has 4 fields where the header has 3",
            ),
            (
                format!("{HEADER}\n{at},4294967296,2"),
                "line 2: ContextTokens is \"4294967296\"; the most is 4294967295",
            ),
            (
                format!("{HEADER}\n{at},-1,2"),
                "line 2: ContextTokens is \"-1\", which is not a whole number",
            ),
            (
                format!("{HEADER}\n{at},+1,2"),
                "line 2: ContextTokens is \"+1\", which is not a whole number",
            ),
            (
                format!("{HEADER}\n{at},1.5,2"),
                "line 2: ContextTokens is \"1.5\", which is not a whole number",
            ),
            (
                format!("{HEADER}\n2023-11-16,1,2"),
                "line 2: TIMESTAMP is \"2023-11-16\", which is not a date",
            ),
            (
                format!("{HEADER}\n2023-13-16 18:15:46,1,2"),
                "line 2: TIMESTAMP is \"2023-13-16 18:15:46\"",
            ),
            (
                format!("{HEADER}\n\"{at},1,2"),
                "line 2: TIMESTAMP is \"\\\"2023",
            ),
        ] {
            let said = error(&text);
            assert!(said.starts_with(expected), "{text:?} gave {said}");
            assert!(!said.contains('\n'));
        }
        assert!(read(b"TIMESTAMP,ContextTokens,GeneratedTokens\n\xff\xfe,1,2").is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn any_bytes_give_rows_or_one_line(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            if let Err(error) = read(&bytes) {
                prop_assert!(!error.to_string().contains('\n'));
            }
        }

        #[test]
        fn a_damaged_trace_gives_rows_or_one_line_that_exists(
            rows in proptest::collection::vec((0u64..1 << 40, 1u32.., 0u32..), 1..20),
            crlf in any::<bool>(),
            damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>(), 0u8..3), 0..6),
        ) {
            let end = if crlf { "\r\n" } else { "\n" };
            let mut text = format!("{HEADER}{end}");
            for (ns, context, generated) in &rows {
                let second = ns / 1_000_000_000 % 60;
                text += &format!("2023-11-16 18:15:{second:02}.{:09},{context},{generated}{end}", ns % 1_000_000_000);
            }
            let mut bytes = text.into_bytes();
            let whole = read(&bytes).unwrap();
            prop_assert_eq!(whole.len(), rows.len());
            for (row, (_, context, generated)) in whole.iter().zip(&rows) {
                prop_assert_eq!((row.context, row.generated), (*context, *generated));
            }
            for (at, byte, how) in damage {
                if bytes.is_empty() {
                    break;
                }
                let at = at.index(bytes.len());
                match how {
                    0 => bytes[at] = byte,
                    1 => drop(bytes.remove(at)),
                    _ => bytes.truncate(at),
                }
            }
            let lines = 1 + bytes.iter().filter(|byte| matches!(byte, b'\n' | b'\r')).count();
            if let Err(error) = read(&bytes) {
                prop_assert!(!error.to_string().contains('\n'));
                prop_assert!(error.line >= 1 && error.line <= lines, "{error} of {lines}");
            }
        }
    }
}
