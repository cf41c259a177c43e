//! The report as text and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::findings::{Finding, Findings};
use super::site::{Frame, Site};

/// The most frames of one site in the text.
const SHOWN: usize = 8;

#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) pid: u32,
    pub(crate) program: String,
    pub(crate) calls: u64,
    pub(crate) injected: u64,
    pub(crate) findings: Findings,
}

impl Report {
    /// Returns the text, in lines that begin with `fakecuda: ` or are indented.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        let found = match self.findings.count() {
            0 => "nothing found".to_owned(),
            1 => "1 finding".to_owned(),
            count => format!("{count} findings"),
        };
        let calls = match self.calls {
            1 => "1 call".to_owned(),
            count => format!("{count} calls"),
        };
        let _ = write!(
            text,
            "fakecuda: process {} ({}), {calls}: {found}",
            self.pid, self.program
        );
        if self.injected > 0 {
            let _ = write!(text, "; {} failed by injection", self.injected);
        }
        text.push('\n');
        for finding in &self.findings.kept {
            let _ = writeln!(text, "fakecuda: {}: {}", finding.what.name(), line(finding));
            for (did, site) in &finding.sites {
                let _ = writeln!(text, "    {did} by {}", site.call);
                for line in places(site) {
                    let _ = writeln!(text, "        {line}");
                }
            }
        }
        if self.findings.dropped > 0 {
            let _ = writeln!(text, "fakecuda: and {} more", self.findings.dropped);
        }
        text
    }

    pub(crate) fn json(&self) -> String {
        let findings: Vec<_> = self.findings.kept.iter().map(as_json).collect();
        let report = json!({
            "fakecuda": 1,
            "pid": self.pid,
            "program": self.program,
            "calls": self.calls,
            "injected": self.injected,
            "found": self.findings.count(),
            "findings": findings,
            "dropped": self.findings.dropped,
        });
        format!("{report}\n")
    }
}

/// Returns a finding's line: its text, or the figures of all if there are several.
fn line(finding: &Finding) -> String {
    if finding.times == 1 {
        return finding.text.clone();
    }
    let bytes = match finding.bytes {
        0 => String::new(),
        bytes => format!(", {} in all", size(bytes)),
    };
    format!("{}; {} times here{bytes}", finding.text, finding.times)
}

/// Formats a size in the largest binary unit that divides it.
pub(crate) fn size(bytes: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let fits = |&&(_, shift): &&(&str, u32)| bytes > 0 && bytes.is_multiple_of(1 << shift);
    match units.iter().find(fits) {
        Some((unit, shift)) => format!("{} {unit}", bytes >> shift),
        None => format!("{bytes} B"),
    }
}

/// Returns a site's lines: of the Python program, else of the native frames.
fn places(site: &Site) -> Vec<String> {
    let mut lines: Vec<_> = site
        .python
        .iter()
        .map(|line| format!("{}:{} in {}", line.file, line.line, line.function))
        .collect();
    if lines.is_empty() {
        lines = site.frames().iter().map(native).collect();
    }
    let left = lines.len().saturating_sub(SHOWN);
    lines.truncate(SHOWN);
    if left > 0 {
        lines.push(format!("and {left} more"));
    }
    lines
}

fn native(frame: &Frame) -> String {
    let function = frame
        .function
        .as_deref()
        .unwrap_or("a function without a name");
    match (&frame.file, frame.line, &frame.module) {
        (Some(file), Some(line), _) => format!("{file}:{line} in {function}"),
        (_, _, Some(module)) => format!("{function}, {module}+{:#x}", frame.offset),
        _ => format!("{function}, {:#x}", frame.offset),
    }
}

fn as_json(finding: &Finding) -> Value {
    let hex = |value: &u64| format!("{value:#x}");
    let sites: Vec<_> = finding
        .sites
        .iter()
        .map(|(did, site)| place(did, site))
        .collect();
    json!({
        "finding": finding.what.key(),
        "object": finding.object,
        "values": finding.values.iter().map(hex).collect::<Vec<_>>(),
        "message": finding.text,
        "times": finding.times,
        "bytes": finding.bytes,
        "sites": sites,
    })
}

fn place(did: &str, site: &Site) -> Value {
    let python = site
        .python
        .iter()
        .map(|line| json!({"file": line.file, "line": line.line, "function": line.function}));
    let frames = site.frames().into_iter().map(|frame| {
        json!({
            "function": frame.function,
            "file": frame.file,
            "line": frame.line,
            "module": frame.module,
            "offset": format!("{:#x}", frame.offset),
        })
    });
    json!({
        "what": did,
        "call": site.call,
        "python": python.collect::<Vec<_>>(),
        "frames": frames.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnosis::findings::What;

    fn report(findings: Findings) -> Report {
        Report {
            pid: 7,
            program: "train".to_owned(),
            calls: 12,
            injected: 0,
            findings,
        }
    }

    #[test]
    fn a_report_without_findings_is_one_line() {
        let clean = report(Findings::default());
        assert_eq!(
            clean.text(),
            "fakecuda: process 7 (train), 12 calls: nothing found\n"
        );
        let one = Report {
            calls: 1,
            ..report(Findings::default())
        };
        assert!(one.text().contains(", 1 call: "), "{}", one.text());
        let json: Value = serde_json::from_str(&clean.json()).unwrap();
        assert_eq!((&json["found"], &json["pid"]), (&json!(0), &json!(7)));
    }

    #[test]
    fn equal_findings_are_counted_with_their_bytes() {
        let mut findings = Findings::default();
        let site = Site::here();
        for value in [0x10, 0x20] {
            findings.add(Finding {
                what: What::Leak,
                object: "physical",
                values: vec![value],
                text: "a physical of 2 MiB".to_owned(),
                sites: vec![("made", std::sync::Arc::clone(&site))],
                times: 1,
                bytes: 2 << 20,
            });
        }
        let report = report(findings);
        assert!(report.text().contains("calls: 2 findings\n"));
        let line =
            "fakecuda: leaked: a physical of 2 MiB; 2 times here, 4 MiB in all\n    made by ";
        assert!(report.text().contains(line), "{}", report.text());
        let json: Value = serde_json::from_str(&report.json()).unwrap();
        assert_eq!(json["findings"][0]["values"], json!(["0x10", "0x20"]));
    }

    #[test]
    fn sizes_have_the_largest_unit_that_divides_them() {
        let said = [0, 1000, 2 << 20, 3 << 30, 1536].map(size);
        assert_eq!(said, ["0 B", "1000 B", "2 MiB", "3 GiB", "1536 B"]);
    }
}
