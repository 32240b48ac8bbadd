//! Rust source with comments and literals blanked, so that a word found in it is a word of code.
//! In: any text. Out: the same number of lines, each character of a comment, string or character literal a space.
//! Not a parser: enough to tell code from prose, to find words and to match braces.
//! Invariant: line `n` of the output is line `n` of the input. Tested below.

/// The text with comments and the insides of literals replaced by spaces.
pub fn code_only(text: &str) -> String {
    let source: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < source.len() {
        let end = literal_end(&source, at);
        if end == at {
            out.push(source[at]);
            at += 1;
        } else {
            out.extend(source[at..end].iter().map(|&c| if c == '\n' { '\n' } else { ' ' }));
            at = end;
        }
    }
    out
}

/// Where the comment or literal that begins at `at` ends; `at` itself when none begins there.
fn literal_end(source: &[char], at: usize) -> usize {
    let next = |offset: usize| source.get(at + offset).copied().unwrap_or('\0');
    match (source[at], next(1)) {
        ('/', '/') => find_char(source, at, |c| c == '\n'),
        ('/', '*') => block_comment_end(source, at),
        ('"', _) => string_end(source, at + 1),
        ('r', '"' | '#') if !is_inside_word(source, at) => raw_string_end(source, at),
        ('\'', '\\') => find_char(source, at + 3, |c| c == '\'') + 1,
        // 'x' is a character, 'x without the second quote a lifetime.
        ('\'', _) if next(2) == '\'' => at + 3,
        _ => at,
    }
    .min(source.len())
}

fn find_char(source: &[char], from: usize, wanted: impl Fn(char) -> bool) -> usize {
    (from..source.len()).find(|&i| wanted(source[i])).unwrap_or(source.len())
}

/// Block comments nest.
fn block_comment_end(source: &[char], at: usize) -> usize {
    let (mut depth, mut i) = (0_usize, at);
    while i + 1 < source.len() {
        match (source[i], source[i + 1]) {
            ('/', '*') => (depth, i) = (depth + 1, i + 2),
            ('*', '/') => (depth, i) = (depth - 1, i + 2),
            _ => i += 1,
        }
        if depth == 0 {
            return i;
        }
    }
    source.len()
}

fn string_end(source: &[char], from: usize) -> usize {
    let mut i = from;
    while i < source.len() && source[i] != '"' {
        i += if source[i] == '\\' { 2 } else { 1 };
    }
    i + 1
}

/// `r"…"`, `r#"…"#` and so on; `r#name` is a raw identifier, not a literal.
fn raw_string_end(source: &[char], at: usize) -> usize {
    let open = find_char(source, at + 1, |c| c != '#');
    if source.get(open) != Some(&'"') {
        return at;
    }
    let hashes = open - at - 1;
    let closes = |i: usize| source[i] == '"' && (1..=hashes).all(|h| source.get(i + h) == Some(&'#'));
    (open + 1..source.len()).find(|&i| closes(i)).map_or(source.len(), |i| i + 1 + hashes)
}

/// Whether the character before `at` belongs to the same word (a `b` before a raw string does not count).
fn is_inside_word(source: &[char], at: usize) -> bool {
    let word = |i: usize| source[i].is_alphanumeric() || source[i] == '_';
    match at {
        0 => false,
        1 => word(0) && source[0] != 'b',
        _ => word(at - 1) && (source[at - 1] != 'b' || word(at - 2)),
    }
}

/// The lines (from 1) on which `word` stands as a whole word or path, in blanked code.
pub fn lines_with(code: &str, word: &str) -> Vec<usize> {
    code.lines().enumerate().filter(|(_, line)| has_word(line, word)).map(|(index, _)| index + 1).collect()
}

/// Whether `word` stands in the line with no letter, digit or `_` touching it.
pub fn has_word(line: &str, word: &str) -> bool {
    let in_word = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let joined_before = word.starts_with(in_word) && line[..at].ends_with(in_word);
        let joined_after = word.ends_with(in_word) && line[at + word.len()..].starts_with(in_word);
        !joined_before && !joined_after
    })
}

/// The line (from 1) of the brace that closes the first `{` at or after byte `from` of the code, unless a `;` at
/// the same level comes first.
pub fn block_end(code: &str, from: usize) -> Option<usize> {
    let (mut braces, mut others) = (0_usize, 0_usize);
    for (offset, c) in code[from..].char_indices() {
        match c {
            '{' => braces += 1,
            '}' => {
                braces = braces.checked_sub(1)?;
                if braces == 0 {
                    return Some(code[..from + offset].matches('\n').count() + 1);
                }
            }
            '(' | '[' => others += 1,
            ')' | ']' => others = others.saturating_sub(1),
            ';' if braces == 0 && others == 0 => return None,
            _ => {}
        }
    }
    None
}

/// The code with the blocks that follow `#[cfg(test)]` blanked: what is built outside tests.
pub fn without_tests(code: &str) -> String {
    let mut lines: Vec<&str> = code.lines().collect();
    let mut from = 0;
    while let Some(found) = code[from..].find("#[cfg(test)]") {
        let at = from + found;
        let first = code[..at].matches('\n').count();
        let last = block_end(code, at).unwrap_or(first + 1);
        lines[first..last.min(code.lines().count())].fill("");
        from = at + 1;
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked_and_lines_stay() {
        let cases = [
            ("a // unsafe", "a          "),
            ("a /* x /* y */ z */ b", "a                   b"),
            (r#"f("un\"safe") g"#, "f(          ) g"),
            ("r#\"a \" b\"# c", "           c"),
            ("br\"x\" y", "b     y"),
            ("let c = '\"'; d", "let c =    ; d"),
            (r"let c = '\''; d", "let c =     ; d"),
            ("fn f<'a>(x: &'a str)", "fn f<'a>(x: &'a str)"),
            ("r#type = 1", "r#type = 1"),
            ("\"one\ntwo\" three", "    \n     three"),
            ("\"unclosed", "         "),
        ];
        for (text, wanted) in cases {
            assert_eq!(code_only(text), wanted, "{text}");
        }
    }

    #[test]
    fn words_are_whole_words() {
        assert!(has_word("unsafe { x }", "unsafe"));
        assert!(!has_word("unsafe_code", "unsafe"));
        assert!(!has_word("not_unsafe", "unsafe"));
        assert!(has_word("std::time::Instant::now()", "Instant::now"));
        assert!(!has_word("MyInstant::now()", "Instant::now"));
        assert_eq!(lines_with("a\nunsafe\n", "unsafe"), [2]);
    }

    #[test]
    fn test_modules_are_left_out() {
        let code = "fn a() {}\n#[cfg(test)]\nmod tests {\n    bad();\n}\nfn b() {}\n";
        assert_eq!(without_tests(code), "fn a() {}\n\n\n\n\nfn b() {}");
        assert_eq!(without_tests("#[cfg(test)]\nmod tests;\nfn b() {}"), "\nmod tests;\nfn b() {}");
    }
}
