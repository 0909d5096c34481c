//! Tables of medians, with the ratios that poolfs aims at (its bars).

use std::fmt::Write;

/// How a row's times are shown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shown {
    /// as microseconds
    Microseconds,
    /// as the speed of so many bytes
    Speed(u64),
}

/// A bar: the times of a cell, in parts of another cell's.
#[derive(Clone, Copy, Debug)]
pub struct Bar {
    /// The column of the cell, which is in the bar's own row.
    pub column: usize,
    /// Row and column of the other cell.
    pub than: (usize, usize),
    /// How many times faster it is to be; less than 1 where it may be slower.
    pub faster: f64,
}

/// One operation.
pub struct Row {
    /// Its name.
    pub title: String,
    /// How it is shown.
    pub shown: Shown,
    /// A median for each column, nanoseconds; 0 where nothing was measured.
    pub medians: Vec<f64>,
    /// The ratios that poolfs aims at.
    pub bars: Vec<Bar>,
}

/// As Markdown. A number in brackets is how many times the first column's time it is.
pub fn markdown(columns: &[&str], rows: &[Row]) -> String {
    let mut text = format!("| operation | {} | bars |\n|---|", columns.join(" | "));
    text.push_str(&"---|".repeat(columns.len() + 1));
    text.push('\n');
    for row in rows {
        let unit = if row.shown == Shown::Microseconds { "us" } else { "MB/s" };
        let _ = write!(text, "| {}, {unit} |", row.title);
        let first = row.medians[0];
        for (column, &median) in row.medians.iter().enumerate() {
            if median == 0.0 {
                text.push_str(" - |");
                continue;
            }
            let _ = match row.shown {
                Shown::Microseconds => write!(text, " {:.2}", median / 1e3),
                Shown::Speed(bytes) => write!(text, " {:.0}", bytes as f64 * 1e3 / median),
            };
            if column > 0 && first > 0.0 {
                let _ = write!(text, " ({:.2}x)", median / first);
            }
            text.push_str(" |");
        }
        let verdicts: Vec<_> = row.bars.iter().map(|bar| verdict(columns, rows, row, *bar)).collect();
        let _ = writeln!(text, " {} |", verdicts.join("; "));
    }
    text
}

fn verdict(columns: &[&str], rows: &[Row], row: &Row, bar: Bar) -> String {
    let (other, column) = bar.than;
    let than = if column == bar.column { format!("\"{}\"", rows[other].title) } else { columns[column].to_owned() };
    let name = columns[bar.column];
    let wanted = if bar.faster == 1.0 {
        "not slower".to_owned()
    } else if bar.faster > 1.0 {
        format!("{:.2}x faster", bar.faster)
    } else {
        format!("at most {:.2}x slower", 1.0 / bar.faster)
    };
    let (ours, theirs) = (row.medians[bar.column], rows[other].medians[column]);
    if ours == 0.0 || theirs == 0.0 {
        return format!("{name} {wanted} than {than}: not measured");
    }
    let ratio = theirs / ours;
    let measured = if ratio >= 1.0 { format!("{ratio:.2}x faster") } else { format!("{:.2}x slower", 1.0 / ratio) };
    let met = if ratio >= bar.faster { "met" } else { "missed" };
    format!("{name} {measured} than {than}, bar {wanted}: {met}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(medians: &[f64], bars: &[Bar]) -> Row {
        Row { title: "x".into(), shown: Shown::Microseconds, medians: medians.to_vec(), bars: bars.to_vec() }
    }

    #[test]
    fn a_bar_is_met_or_missed_or_not_measured() {
        let bar = |faster| Bar { column: 0, than: (0, 1), faster };
        let text = markdown(&["a", "b"], &[row(&[1000.0, 3000.0], &[bar(2.0), bar(4.0)])]);
        let bars = "a 3.00x faster than b, bar 2.00x faster: met; a 3.00x faster than b, bar 4.00x faster: missed";
        assert!(text.ends_with(&format!("| x, us | 1.00 | 3.00 (3.00x) | {bars} |\n")), "{text}");
        let text = markdown(&["a", "b"], &[row(&[1100.0, 1000.0], &[bar(1.0 / 1.2), bar(1.0)])]);
        let bars =
            "a 1.10x slower than b, bar at most 1.20x slower: met; a 1.10x slower than b, bar not slower: missed";
        assert!(text.contains(bars), "{text}");
        let text = markdown(&["a", "b"], &[row(&[1000.0, 0.0], &[bar(2.0)])]);
        assert!(text.contains("| 1.00 | - | a 2.00x faster than b: not measured |"), "{text}");
    }

    #[test]
    fn a_row_is_compared_with_another_one_and_speeds_are_shown() {
        let mut second = row(&[600.0], &[Bar { column: 0, than: (0, 0), faster: 1.9 }]);
        second.shown = Shown::Speed(6000);
        let text = markdown(&["a"], &[row(&[1200.0], &[]), second]);
        assert!(text.contains("| x, MB/s | 10000 | a 2.00x faster than \"x\", bar 1.90x faster: met |"), "{text}");
    }
}
