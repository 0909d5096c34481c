//! Checks the files of each crate for circles: files that use each other, directly or by way of others. A file of a circle cannot be read, or
//! changed, without all the others.

use super::sources::rust_files;
use anyhow::{Context, Result};
use petgraph::algo::tarjan_scc;
use petgraph::graphmap::DiGraphMap;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use syn::visit::Visit;
use syn::{Attribute, ItemMod, ItemUse, Macro, UseTree};

/// How many files of a crate are in circles. These numbers only ever become smaller; a crate that is not named has none.
const IN_CIRCLES: &[(&str, usize)] = &[("control/cli", 16), ("control/image", 4)];

/// The module paths of a crate's files, each with the files' modules that it uses.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// Compares each crate's circles with the list.
pub fn check(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let mut crates: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    for (file, text) in rust_files(root)? {
        if let Some((of, inner)) = file.split_once("/src/")
            && !inner.split('/').any(|part| matches!(part.trim_end_matches(".rs"), "tests" | "bin" | "models"))
        {
            crates.entry(of.to_owned()).or_default().push((module_path(inner), text));
        }
    }
    for (of, files) in crates {
        let uses = uses(&files).with_context(|| format!("cannot parse the crate in {of}"))?;
        let circles = circles(&uses);
        let count: usize = circles.iter().map(Vec::len).sum();
        let known = IN_CIRCLES.iter().find(|(known, _)| *known == of).map_or(0, |(_, count)| *count);
        if count > known {
            let named: Vec<String> = circles.iter().map(|circle| circle.join(", ")).collect();
            findings.push(format!("{of}: files use each other, {count} instead of {known}: {}", named.join("; ")));
        } else if count < known {
            findings
                .push(format!("{of} has {count} files in circles: correct the number in xtask/src/tidy/circles.rs"));
        }
    }
    Ok(())
}

/// The module of a file below `src/`; that of the crate itself is empty.
fn module_path(inner: &str) -> String {
    let mut parts: Vec<&str> = inner.trim_end_matches(".rs").split('/').collect();
    if matches!(parts.last(), Some(&("mod" | "lib" | "main"))) {
        parts.pop();
    }
    parts.join("::")
}

/// Who uses whom. The crate's root is left out: it names all others, and what it exports is the crate's.
fn uses(files: &[(String, String)]) -> Result<Uses> {
    let modules: BTreeSet<&str> = files.iter().map(|(module, _)| module.as_str()).collect();
    let mut all = Uses::new();
    for (module, text) in files.iter().filter(|(module, _)| !module.is_empty()) {
        let mut found = Paths { module: module.split("::").map(str::to_owned).collect(), paths: Vec::new() };
        found.visit_file(&syn::parse_file(text).with_context(|| module.clone())?);
        let used = found.paths.iter().filter_map(|path| owner(path, &modules));
        all.insert(module.clone(), used.filter(|used| used != module && !used.is_empty()).collect());
    }
    Ok(all)
}

/// The file in which a path ends: that of its longest beginning that is one.
fn owner(path: &[String], modules: &BTreeSet<&str>) -> Option<String> {
    (1..=path.len()).rev().map(|length| path[..length].join("::")).find(|module| modules.contains(module.as_str()))
}

/// Files that reach each other, in groups of more than one.
fn circles(uses: &Uses) -> Vec<Vec<String>> {
    let mut graph = DiGraphMap::<&str, ()>::new();
    for (module, used) in uses {
        used.iter().filter(|used| uses.contains_key(*used)).for_each(|used| {
            graph.add_edge(module.as_str(), used.as_str(), ());
        });
    }
    let groups = tarjan_scc(&graph).into_iter().filter(|group| group.len() > 1);
    groups
        .map(|group| {
            let mut names: Vec<String> = group.into_iter().map(str::to_owned).collect();
            names.sort();
            names
        })
        .collect()
}

/// The paths into its own crate that a file uses, as modules from the root on.
struct Paths {
    module: Vec<String>,
    paths: Vec<Vec<String>>,
}

impl Paths {
    /// Notes a path that begins in the crate.
    fn note(&mut self, segments: &[String]) {
        let mut rest = segments;
        let mut from = match rest.split_first() {
            Some((first, after)) if first == "crate" => {
                rest = after;
                Vec::new()
            }
            Some((first, after)) if first == "self" => {
                rest = after;
                self.module.clone()
            }
            Some((first, _)) if first == "super" => self.module.clone(),
            _ => return,
        };
        while let Some((first, after)) = rest.split_first()
            && first == "super"
        {
            from.pop();
            rest = after;
        }
        from.extend_from_slice(rest);
        self.paths.push(from);
    }

    fn note_tree(&mut self, before: &mut Vec<String>, tree: &UseTree) {
        match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.note_tree(before, &path.tree);
                before.pop();
            }
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.note_tree(before, tree)),
            UseTree::Name(name) => self.note(&[before.as_slice(), &[name.ident.to_string()]].concat()),
            UseTree::Rename(name) => self.note(&[before.as_slice(), &[name.ident.to_string()]].concat()),
            UseTree::Glob(_) => self.note(before),
        }
    }
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        let is_test = |part: &str| part.trim() == "test";
        list.path.is_ident("cfg") && list.tokens.to_string().split(['(', ')', ',']).any(is_test)
    })
}

impl<'ast> Visit<'ast> for Paths {
    /// Who may use a thing is no use of who is named there.
    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {}

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        if !is_for_tests(&module.attrs) {
            self.module.push(module.ident.to_string());
            syn::visit::visit_item_mod(self, module);
            self.module.pop();
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if !is_for_tests(&item.attrs) {
            self.note_tree(&mut Vec::new(), &item.tree);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.note(&segments);
        syn::visit::visit_path(self, path);
    }

    /// What is in a macro is tokens: paths in it begin where `crate` stands.
    fn visit_macro(&mut self, used: &'ast Macro) {
        let text = used.tokens.to_string().replace(' ', "");
        for (at, _) in text.match_indices("crate::") {
            let path =
                text[at..].split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').next().unwrap_or_default();
            let segments: Vec<String> = path.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect();
            self.note(&segments);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let files: Vec<_> = files.iter().map(|(module, text)| (module_path(module), (*text).to_owned())).collect();
        circles(&uses(&files).expect("parsed"))
    }

    #[test]
    fn files_that_reach_each_other_are_a_circle() {
        let ring = [
            ("lib.rs", "mod a; mod b; mod c; mod d; pub use a::A;"),
            ("a.rs", "use crate::b::{C, d::D};"),
            ("b/mod.rs", "fn f() -> crate::c::C { todo() }"),
            ("c.rs", "fn f() { format!(\"{}\", crate::a::x()); }"),
            ("d.rs", "use crate::A; use super::a::A; #[cfg(all(test, not(loom)))] mod tests { use crate::e::E; }"),
            ("e.rs", "use crate::d; use super::d::D;"),
        ];
        assert_eq!(found(&ring), [["a", "b", "c"]]);
        assert!(found(&ring[..3]).is_empty());
    }

    #[test]
    fn a_folder_and_its_files_may_be_one() {
        let nested = [("lib.rs", ""), ("a.rs", "mod x; use x::Y; use self::x::X;"), ("a/x.rs", "use super::A;")];
        assert_eq!(found(&nested), [["a", "a::x"]]);
        let upper =
            [("lib.rs", ""), ("a.rs", "mod x;"), ("a/x.rs", "use super::super::b::B;"), ("b.rs", "use crate::a::x;")];
        assert_eq!(found(&upper), [["a::x", "b"]]);
    }
}
