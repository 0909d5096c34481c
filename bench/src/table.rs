//! Tables of medians and ratios.

use std::fmt::Write;

/// What the numbers of a table are shown in.
#[derive(Clone, Copy)]
pub enum Unit {
    /// Microseconds of nanoseconds
    Microseconds,
    /// Milliseconds of nanoseconds
    Milliseconds,
    /// KiB of bytes
    Kibibytes,
    /// MiB of bytes
    Mebibytes,
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Self::Microseconds => "us",
            Self::Milliseconds => "ms",
            Self::Kibibytes => "KiB",
            Self::Mebibytes => "MiB",
        }
    }

    fn size(self) -> f64 {
        match self {
            Self::Microseconds => 1e3,
            Self::Milliseconds => 1e6,
            Self::Kibibytes => 1024.0,
            Self::Mebibytes => 1_048_576.0,
        }
    }
}

/// Medians in nanoseconds (or bytes), one row an operation, one column a target.
pub struct Table {
    /// What the rows are.
    pub kind: &'static str,
    /// How the numbers are shown.
    pub unit: Unit,
    /// Headings of the columns; the first one is compared with every other.
    pub columns: Vec<String>,
    /// The rows.
    pub rows: Vec<Row>,
}

/// One operation.
pub struct Row {
    /// Its name.
    pub title: String,
    /// A median for each column, nanoseconds or bytes; 0 where nothing was measured.
    pub medians: Vec<f64>,
}

impl Table {
    /// Of operations, in microseconds.
    pub fn of_operations(columns: &[&str], rows: Vec<Row>) -> Self {
        Self::new("operation", Unit::Microseconds, columns, rows)
    }

    /// Of rows of another kind, in another unit.
    pub fn new(kind: &'static str, unit: Unit, columns: &[&str], rows: Vec<Row>) -> Self {
        Self { kind, unit, columns: columns.iter().map(|&column| column.to_owned()).collect(), rows }
    }

    /// As Markdown: medians, in brackets how many times the first column's median it is.
    pub fn markdown(&self) -> String {
        let mut text = format!("| {}, {} | {} |\n|---|", self.kind, self.unit.name(), self.columns.join(" | "));
        text.push_str(&"---|".repeat(self.columns.len()));
        text.push('\n');
        for row in &self.rows {
            let first = row.medians.first().copied().unwrap_or(0.0);
            let _ = write!(text, "| {} |", row.title);
            for (column, median) in row.medians.iter().enumerate() {
                if *median == 0.0 {
                    text.push_str(" - |");
                    continue;
                }
                let _ = write!(text, " {:.2}", median / self.unit.size());
                if column > 0 && first > 0.0 {
                    let _ = write!(text, " ({:.2}x)", median / first);
                }
                text.push_str(" |");
            }
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_shows_units_and_ratios() {
        let row = |medians: &[f64]| vec![Row { title: "x".into(), medians: medians.to_vec() }];
        let text = Table::of_operations(&["a", "b", "c"], row(&[1000.0, 2500.0, 0.0])).markdown();
        assert!(text.starts_with("| operation, us | a | b | c |\n|---|---|---|---|\n"), "{text}");
        assert!(text.contains("| x | 1.00 | 2.50 (2.50x) | - |"), "{text}");
        let text = Table::new("memory", Unit::Mebibytes, &["a"], row(&[1_572_864.0])).markdown();
        assert!(text.contains("| memory, MiB | a |") && text.contains("| x | 1.50 |"), "{text}");
    }
}
