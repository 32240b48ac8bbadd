//! The files of a crate use each other in one direction: their dependencies form no circle.
//! In: parsed sources. Out: a finding for each circle, with the shortest way around it.
//!
//! An edge leads from a file to the file that defines what it names, by `use` or by a path that begins with `crate`,
//! `self`, `super` or a child module. A name that another file imports or re-exports counts for the file that defines
//! it, so a parent that declares its children and re-exports their types is no circle. Test code is left out. Macros are
//! read as tokens.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use super::syntax::{RustSource, is_test_only};
use super::tree::Finding;

/// How many imports are followed from one name before it counts as unresolved.
const IMPORT_DEPTH_MAX: usize = 8;

type ModulePath = Vec<String>;

/// Checks the files of each crate.
pub fn check(sources: &[RustSource]) -> Vec<Finding> {
    let mut packages: BTreeMap<&str, Vec<&RustSource>> = BTreeMap::new();
    for source in sources {
        packages.entry(&source.package).or_default().push(source);
    }
    packages.values().flat_map(|sources| check_package(sources)).collect()
}

fn check_package(sources: &[&RustSource]) -> Vec<Finding> {
    let graph = Graph::new(sources);
    graph
        .circles()
        .into_iter()
        .map(|circle| {
            let path = &graph.files[&circle[0]].path;
            let names: Vec<String> =
                circle.iter().chain(&circle[..1]).map(|module| display(module)).collect();
            Finding::new(path, 1, format!("files use each other in a circle: {}", names.join(" -> ")))
        })
        .collect()
}

fn display(module: &[String]) -> String {
    if module.is_empty() { "lib".to_owned() } else { module.join("::") }
}

/// What one file names.
#[derive(Default)]
struct FileNames {
    path: String,
    /// Names that the file imports or re-exports, with the path that each stands for.
    imports: BTreeMap<String, Vec<String>>,
    /// Every path that the file uses and does not merely re-export.
    uses: BTreeSet<Vec<String>>,
}

struct Graph {
    files: BTreeMap<ModulePath, FileNames>,
}

impl Graph {
    fn new(sources: &[&RustSource]) -> Graph {
        let mut files = BTreeMap::new();
        for source in sources {
            let mut collector = Collector { depth: 0, names: FileNames::default() };
            collector.names.path = source.path.clone();
            collector.visit_file(&source.ast);
            files.insert(source.module.clone(), collector.names);
        }
        Graph { files }
    }

    /// The files that the file of this module depends on.
    fn edges(&self, module: &ModulePath) -> BTreeSet<ModulePath> {
        let used = self.files[module].uses.iter();
        used.filter_map(|path| self.definition(module, path)).filter(|target| target != module).collect()
    }

    /// The file that defines what `path`, as written in `module`, names; `None` for what other crates define.
    fn definition(&self, module: &ModulePath, path: &[String]) -> Option<ModulePath> {
        let mut at = self.absolute(module, path)?;
        for _ in 0..IMPORT_DEPTH_MAX {
            let file =
                (0..=at.len()).rev().map(|end| at[..end].to_vec()).find(|m| self.files.contains_key(m))?;
            let rest = &at[file.len()..];
            let Some(imported) = rest.first().and_then(|name| self.files[&file].imports.get(name)) else {
                return Some(file);
            };
            let mut next = self.absolute(&file, imported)?;
            if next == at {
                return Some(file);
            }
            next.extend(rest[1..].iter().cloned());
            at = next;
        }
        None
    }

    /// The path from the crate's root, or `None` when it begins with another crate's name.
    fn absolute(&self, module: &ModulePath, path: &[String]) -> Option<Vec<String>> {
        let mut base = module.clone();
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => (base, rest) = (Vec::new(), &path[1..]),
            "self" => rest = &path[1..],
            "super" => {
                while rest.first().is_some_and(|segment| segment == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            first => {
                let child: ModulePath = [module.as_slice(), &[first.to_owned()]].concat();
                if !self.files.contains_key(&child) {
                    return None;
                }
            }
        }
        Some([base.as_slice(), rest].concat())
    }

    /// One shortest circle through the first file of each group of files that reach each other.
    fn circles(&self) -> Vec<Vec<ModulePath>> {
        let edges: BTreeMap<&ModulePath, BTreeSet<ModulePath>> =
            self.files.keys().map(|module| (module, self.edges(module))).collect();
        let mut covered = BTreeSet::new();
        let mut circles = Vec::new();
        for module in self.files.keys() {
            if covered.contains(module) {
                continue;
            }
            if let Some(circle) = shortest_circle(&edges, module) {
                covered.extend(circle.iter().cloned());
                circles.push(circle);
            }
        }
        circles
    }
}

/// Breadth first from `start` until an edge leads back to it.
fn shortest_circle(
    edges: &BTreeMap<&ModulePath, BTreeSet<ModulePath>>,
    start: &ModulePath,
) -> Option<Vec<ModulePath>> {
    let mut came_from: BTreeMap<&ModulePath, &ModulePath> = BTreeMap::new();
    let mut queue = VecDeque::from([start]);
    while let Some(module) = queue.pop_front() {
        for next in &edges[module] {
            if next == start {
                let mut circle = vec![module.clone()];
                let mut at = module;
                while let Some(previous) = came_from.get(at) {
                    circle.push((*previous).clone());
                    at = previous;
                }
                circle.reverse();
                return Some(circle);
            }
            if !came_from.contains_key(next) {
                came_from.insert(next, module);
                queue.push_back(next);
            }
        }
    }
    None
}

/// Collects what one file names. `depth` is how many inline modules it is in.
struct Collector {
    depth: usize,
    names: FileNames,
}

impl Collector {
    /// Takes the path as the file itself would write it: inline modules need a `super` more.
    fn add_use(&mut self, path: Vec<String>) {
        if let Some(path) = self.outside_inline_modules(path) {
            self.names.uses.insert(path);
        }
    }

    fn outside_inline_modules(&self, mut path: Vec<String>) -> Option<Vec<String>> {
        let mut depth = self.depth;
        while depth > 0 && path.first().is_some_and(|segment| segment == "super") {
            path.remove(0);
            depth -= 1;
        }
        match (depth == self.depth, depth) {
            _ if path.first().is_some_and(|segment| segment == "crate") => Some(path),
            (_, 0) if path.first().is_some_and(|segment| segment == "super" || self.depth == 0) => Some(path),
            // A name of the file itself.
            (false, 0) => Some([vec!["self".to_owned()], path].concat()),
            _ => None,
        }
    }

    fn add_tree(&mut self, tree: &syn::UseTree, before: &[String], is_reexport: bool) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        match tree {
            syn::UseTree::Path(path) => self.add_tree(&path.tree, &with(&path.ident), is_reexport),
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|item| self.add_tree(item, before, is_reexport));
            }
            syn::UseTree::Glob(_) => self.add_use(before.to_vec()),
            syn::UseTree::Name(name) if name.ident == "self" => {
                let alias = before.last().cloned().unwrap_or_default();
                self.add_import(before.to_vec(), alias, is_reexport);
            }
            syn::UseTree::Name(name) => {
                self.add_import(with(&name.ident), name.ident.to_string(), is_reexport)
            }
            syn::UseTree::Rename(rename) => {
                self.add_import(with(&rename.ident), rename.rename.to_string(), is_reexport);
            }
        }
    }

    fn add_import(&mut self, path: Vec<String>, alias: String, is_reexport: bool) {
        if self.depth == 0 {
            self.names.imports.insert(alias, path.clone());
        }
        if !is_reexport {
            self.add_use(path);
        }
    }

    /// Paths within the tokens of a macro: `crate`, `self` or `super`, then `::` and names.
    fn add_tokens(&mut self, tokens: &TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens.clone() {
            match &token {
                TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() => colons += 1,
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.add_token_path(std::mem::take(&mut path));
                    }
                    path.push(ident.to_string());
                    colons = 0;
                }
                _ => {
                    self.add_token_path(std::mem::take(&mut path));
                    colons = 0;
                }
            }
            if let TokenTree::Group(group) = &token {
                self.add_tokens(&group.stream());
            }
        }
        self.add_token_path(path);
    }

    fn add_token_path(&mut self, path: Vec<String>) {
        if path.len() > 1 {
            self.add_use(path);
        }
    }
}

impl<'ast> Visit<'ast> for Collector {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if is_test_only(&item.attrs) || item.content.is_none() {
            return;
        }
        self.depth += 1;
        visit::visit_item_mod(self, item);
        self.depth -= 1;
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !is_test_only(&item.attrs) {
            let is_reexport = !matches!(item.vis, syn::Visibility::Inherited);
            self.add_tree(&item.tree, &[], is_reexport);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test_only(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if !is_test_only(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test_only(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {
        // `pub(super)` and `pub(in crate::…)` are no uses.
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 && path.leading_colon.is_none() {
            self.add_use(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, found: &'ast syn::Macro) {
        self.add_tokens(&found.tokens);
        visit::visit_macro(self, found);
    }
}

#[cfg(test)]
mod tests {
    use super::super::syntax::parse_test_tree;
    use super::*;

    fn messages(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<(String, &str)> =
            files.iter().map(|(name, text)| (format!("crates/wire/src/{name}"), *text)).collect();
        let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (name.as_str(), *text)).collect();
        check(&parse_test_tree(&files)).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn files_that_use_each_other_are_found() {
        let circle = ["files use each other in a circle: a -> b -> a"];
        let root = ("lib.rs", "mod a;\nmod b;\n");
        let uses_b = ("a.rs", "use crate::b::B;\npub struct A(B);\n");
        assert_eq!(messages(&[root, uses_b, ("b.rs", "use super::a;\npub struct B;\n")]), circle);
        assert_eq!(messages(&[root, uses_b, ("b.rs", "fn f() { crate::a::go() }\n")]), circle);
        assert_eq!(
            messages(&[root, uses_b, ("b.rs", "fn f() { println!(\"{}\", crate::a::X); }\n")]),
            circle
        );
        assert_eq!(messages(&[root, uses_b, ("b.rs", "pub struct B;\n")]), [""; 0]);
    }

    #[test]
    fn a_child_that_uses_its_parent_is_found_and_a_facade_is_not() {
        let child = ("hash/journal.rs", "use super::Volume;\npub struct Journal;\n");
        let defines = ("hash/mod.rs", "mod journal;\nuse journal::Journal;\npub struct Volume(Journal);\n");
        assert_eq!(messages(&[defines, child]).len(), 1);
        let facade = (
            "hash/mod.rs",
            "mod journal;\nmod volume;\npub use journal::Journal;\npub use volume::Volume;\n",
        );
        let volume = ("hash/volume.rs", "pub struct Volume;\n");
        assert_eq!(messages(&[facade, child, volume]), [""; 0]);
        let circle = ("hash/volume.rs", "pub struct Volume(super::Journal);\n");
        assert_eq!(messages(&[facade, child, circle]).len(), 1);
    }

    #[test]
    fn tests_and_other_crates_are_no_edges() {
        let a = ("a.rs", "use crate::b::B;\nuse octokv_base::Nanos;\npub struct A(B, Nanos);\n");
        let test = "pub struct B;\n#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}\n";
        assert_eq!(messages(&[a, ("b.rs", test)]), [""; 0]);
        assert_eq!(messages(&[a, ("b.rs", "pub struct B(super::a::Nanos);\n")]), [""; 0]);
    }

    #[test]
    fn an_inline_module_belongs_to_its_file() {
        let a = ("a.rs", "mod inner {\n    use super::super::b::B;\n    use super::Own;\n}\nstruct Own;\n");
        assert_eq!(messages(&[a, ("b.rs", "use crate::a::Own;\n")]).len(), 1);
        assert_eq!(messages(&[a, ("b.rs", "pub struct B;\n")]), [""; 0]);
    }
}
