//! What was measured of an experiment: as tables, and as JSON with all samples.

use crate::worker::median;
use serde::Serialize;
use std::fmt::Write;

/// All samples of one system in one setting.
#[derive(Debug, Serialize)]
pub struct Series {
    /// What was measured.
    pub system: &'static str,
    /// In which setting; a column of the table.
    pub setting: &'static str,
    /// In the experiment's unit, in the order of the rounds.
    pub samples: Vec<f64>,
}

/// One experiment of a paper.
#[derive(Debug, Serialize)]
pub struct Experiment {
    /// Its heading.
    pub title: &'static str,
    /// Section and figure of the paper that it repeats.
    pub repeats: &'static str,
    /// What was done, and how it differs from the paper's.
    pub about: String,
    /// What the samples are in.
    pub unit: &'static str,
    /// Two settings, the second of which is shown in percent of the first.
    pub kept: Option<(&'static str, &'static str)>,
    /// The samples.
    pub series: Vec<Series>,
}

impl Experiment {
    /// Adds a sample.
    pub fn add(&mut self, system: &'static str, setting: &'static str, sample: f64) {
        let known = self.series.iter_mut().find(|series| series.system == system && series.setting == setting);
        match known {
            Some(series) => series.samples.push(sample),
            None => self.series.push(Series { system, setting, samples: vec![sample] }),
        }
    }

    /// The systems, in the order in which they were first measured.
    pub fn systems(&self) -> Vec<&'static str> {
        distinct(&self.series, |one| one.system)
    }

    /// The settings, in the same order.
    pub fn settings(&self) -> Vec<&'static str> {
        distinct(&self.series, |one| one.setting)
    }

    /// The median of a system's samples in a setting, if there are any.
    pub fn median(&self, system: &str, setting: &str) -> Option<f64> {
        let series = self.series.iter().find(|series| series.system == system && series.setting == setting)?;
        Some(median(&mut series.samples.clone()))
    }

    /// As Markdown: medians, in brackets in parts of the first system's.
    pub fn markdown(&self) -> String {
        let (systems, settings) = (self.systems(), self.settings());
        let mut text = format!("### {}\n\nRepeats {}. {}\n\n", self.title, self.repeats, self.about);
        let _ = write!(text, "| {} | {} |", self.unit, settings.join(" | "));
        let kept = self.kept.filter(|(one, other)| settings.contains(one) && settings.contains(other));
        text.push_str(if kept.is_some() { " kept |\n" } else { "\n" });
        let _ = writeln!(text, "|{}", "---|".repeat(1 + settings.len() + usize::from(kept.is_some())));
        for (number, system) in systems.iter().enumerate() {
            let _ = write!(text, "| {system} |");
            for setting in &settings {
                let (own, first) = (self.median(system, setting), self.median(systems[0], setting));
                let _ = match (own, first) {
                    (Some(own), Some(first)) if number > 0 && first > 0.0 => {
                        write!(text, " {own:.1} ({:.2}x) |", own / first)
                    }
                    (Some(own), _) => write!(text, " {own:.1} |"),
                    (None, _) => write!(text, " - |"),
                };
            }
            if let Some((alone, beside)) = kept {
                let _ = match (self.median(system, alone), self.median(system, beside)) {
                    (Some(alone), Some(beside)) if alone > 0.0 => write!(text, " {:.0} % |", 100.0 * beside / alone),
                    _ => write!(text, " - |"),
                };
            }
            text.push('\n');
        }
        text
    }
}

/// Each of the names once, in the order of their first appearance.
fn distinct(series: &[Series], name: impl Fn(&Series) -> &'static str) -> Vec<&'static str> {
    let mut names = Vec::new();
    for one in series {
        if !names.contains(&name(one)) {
            names.push(name(one));
        }
    }
    names
}

/// All that was measured for a paper.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Which paper.
    pub paper: &'static str,
    /// Processors and kernel.
    pub machine: String,
    /// Lines about what was not measured, because it is not there.
    pub missing: Vec<String>,
    /// The experiments.
    pub experiments: Vec<Experiment>,
}

impl Report {
    /// As Markdown.
    pub fn markdown(&self) -> String {
        let mut text = format!("{}.\n", self.machine);
        for line in &self.missing {
            let _ = write!(text, "\n- {line}");
        }
        text.push('\n');
        for experiment in &self.experiments {
            let _ = write!(text, "\n{}", experiment.markdown());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn experiment() -> Experiment {
        let mut made = Experiment {
            title: "T",
            repeats: "section 9",
            about: "About.".into(),
            unit: "rounds/s",
            kept: Some(("alone", "beside")),
            series: Vec::new(),
        };
        for (system, setting, sample) in [
            ("a", "alone", 10.0),
            ("a", "alone", 30.0),
            ("a", "alone", 20.0),
            ("a", "beside", 15.0),
            ("b", "alone", 40.0),
        ] {
            made.add(system, setting, sample);
        }
        made
    }

    #[test]
    fn a_table_has_medians_ratios_and_what_is_kept() {
        let text = experiment().markdown();
        let table = "| rounds/s | alone | beside | kept |\n|---|---|---|---|\n| a | 20.0 | 15.0 | 75 % |\n| b | 40.0 (2.00x) | - | - |\n";
        assert!(text.ends_with(table), "{text}");
        assert!(text.starts_with("### T\n\nRepeats section 9. About.\n"), "{text}");
    }

    #[test]
    fn json_has_all_samples() {
        let report =
            Report { paper: "P", machine: "M".into(), missing: vec!["no X".into()], experiments: vec![experiment()] };
        let value = serde_json::to_value(&report).expect("JSON");
        assert_eq!(value["experiments"][0]["series"][0]["samples"], serde_json::json!([10.0, 30.0, 20.0]));
        assert!(report.markdown().starts_with("M.\n\n- no X\n\n### T"), "{}", report.markdown());
    }
}
