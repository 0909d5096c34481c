//! The report as one HTML page with a plot of each experiment: a bar for each median, with a line from the least sample to the greatest.

use crate::danaus::report::{Experiment, Report};
use std::fmt::Write;

/// Sizes in a plot: what names have, what the longest bar has, what follows it, and each bar's height.
const NAME: f64 = 300.0;
const BAR: f64 = 480.0;
const NUMBER: f64 = 100.0;
const HEIGHT: f64 = 18.0;

/// A colour for each setting in turn.
const COLOURS: [&str; 4] = ["#2a6f97", "#e09f3e", "#6a994e", "#9e2a2b"];

/// The page.
pub fn html(report: &Report) -> String {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>{0}</title>\n\
         <style>body {{ font: 15px sans-serif; max-width: 60em; margin: 2em auto }} text {{ font: 12px sans-serif }}</style>\n\
         <h1>{0}</h1>\n<p>{1}.</p>\n<ul>\n",
        escaped(report.paper),
        escaped(&report.machine)
    );
    for line in &report.missing {
        let _ = writeln!(page, "<li>{}</li>", escaped(line));
    }
    page.push_str("</ul>\n");
    for experiment in &report.experiments {
        let _ = write!(
            page,
            "<h2>{}</h2>\n<p>Repeats {}. {}</p>\n{}",
            escaped(experiment.title),
            escaped(experiment.repeats),
            escaped(&experiment.about),
            plot(experiment)
        );
    }
    page.push_str("</html>\n");
    page
}

fn plot(experiment: &Experiment) -> String {
    let most = experiment.series.iter().flat_map(|series| &series.samples).copied().fold(0.0, f64::max);
    let scale = if most > 0.0 { BAR / most } else { 0.0 };
    let settings = experiment.settings();
    let height = HEIGHT * (experiment.series.len() + 1) as f64;
    let mut text = format!("<svg width=\"{}\" height=\"{height}\">\n", NAME + BAR + NUMBER);
    let mut y = 0.0;
    for system in experiment.systems() {
        for series in experiment.series.iter().filter(|series| series.system == system) {
            let place = settings.iter().position(|setting| *setting == series.setting).unwrap_or(0);
            let median = experiment.median(system, series.setting).unwrap_or(0.0);
            let least = series.samples.iter().copied().fold(f64::INFINITY, f64::min);
            let greatest = series.samples.iter().copied().fold(0.0, f64::max);
            let middle = y + HEIGHT / 2.0;
            let _ = writeln!(
                text,
                "<text x=\"0\" y=\"{:.1}\">{}, {}</text><rect x=\"{NAME}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"/>\
                 <line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{middle:.1}\" y2=\"{middle:.1}\" stroke=\"black\"/><text x=\"{:.1}\" y=\"{:.1}\">{median:.1}</text>",
                middle + 4.0,
                escaped(system),
                escaped(series.setting),
                y + 1.0,
                median * scale,
                HEIGHT - 2.0,
                COLOURS[place % COLOURS.len()],
                NAME + least * scale,
                NAME + greatest * scale,
                NAME + greatest * scale + 6.0,
                middle + 4.0,
            );
            y += HEIGHT;
        }
    }
    let _ =
        writeln!(text, "<text x=\"{NAME}\" y=\"{:.1}\">{}</text>\n</svg>", y + HEIGHT - 5.0, escaped(experiment.unit));
    text
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_in_proportion_and_texts_are_escaped() {
        let mut experiment = Experiment {
            title: "a < b",
            repeats: "section 1",
            about: "x & y".into(),
            unit: "MB/s",
            kept: None,
            series: Vec::new(),
        };
        for (system, sample) in [("one", 10.0), ("two", 20.0), ("two", 40.0)] {
            experiment.add(system, "alone", sample);
        }
        let report =
            Report { paper: "P", machine: "M".into(), missing: vec!["no X".into()], experiments: vec![experiment] };
        let page = html(&report);
        assert!(
            page.contains("<h2>a &lt; b</h2>") && page.contains("x &amp; y") && page.contains("<li>no X</li>"),
            "{page}"
        );
        // The greatest sample has all the room.
        for (system, width) in [("one", "120.0"), ("two", "360.0")] {
            let line = page.lines().find(|line| line.contains(&format!(">{system}, alone<"))).expect("a bar");
            assert!(line.contains(&format!("width=\"{width}\"")), "{line}");
        }
        assert!(page.contains(&format!("x2=\"{:.1}\"", NAME + BAR)), "{page}");
    }
}
