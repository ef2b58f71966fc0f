import AFMBundle
import Foundation
import Testing

/// `BUNDLE` is a bundle's folder with the adapter `triage`, as a file and as functions. In it, `answer.txt` is MLX's
/// answer to `PROMPT`, and `triage.txt` the adapter's answer to `MESSAGE`: see the workflow Swift.
private let settings = ProcessInfo.processInfo.environment
private let place = settings["BUNDLE"].map { URL(filePath: $0, directoryHint: .isDirectory) }

private func trimmed(_ text: String) -> String { text.trimmingCharacters(in: .whitespacesAndNewlines) }

@Suite(.enabled(if: place != nil), .serialized)
struct BundleTests {
    let bundle = place!
    let message = settings["MESSAGE"] ?? ""

    func expected(_ name: String) throws -> String {
        try trimmed(String(contentsOf: bundle.appending(path: name), encoding: .utf8))
    }

    @Test func streamsTheAnswerOfMLX() async throws {
        var parts: [Substring] = []
        try await Answers(bundle: bundle).stream(settings["PROMPT"] ?? "") { parts.append($0) }
        #expect(parts.count > 1)
        #expect(try trimmed(parts.joined()) == expected("answer.txt"))
    }

    @Test func switchesAdapters() async throws {
        let answers = try await AdaptedAnswers(bundle: bundle)
        let triage = try adapterArrays(bundle.appending(path: "adapters/triage.safetensors"))
        for (adapter, same) in [(triage, true), ([:], false), (triage, true)] {
            let answer = try await answers.answer(message, adapter: adapter)
            #expect(try (trimmed(answer) == expected("triage.txt")) == same)
        }
    }

    @Test func answersWithAnAdapterSFunctions() async throws {
        var answer = ""
        try await Answers(bundle: bundle.appending(path: "adapters/triage")).stream(message) { answer += $0 }
        #expect(try trimmed(answer) == expected("triage.txt"))
    }

    @Test func answersWithAType() async throws {
        let event = try await Answers(bundle: bundle).event(in: "Reminder: the Film Lecture is on Friday.")
        #expect(event.day.hasSuffix("day"))
    }

    @Test func refusesAPromptLengthThatTheBundleHasNot() async throws {
        await #expect(throws: BundleError.self) {
            try await AdaptedAnswers(bundle: bundle).answer(message, promptLength: 63)
        }
    }
}

@Test(arguments: [Data(), Data(repeating: 255, count: 50), Data([2, 0, 0, 0, 0, 0, 0, 0]) + "{}".utf8])
func refusesWhatIsNoAdapter(content: Data) throws {
    let file = FileManager.default.temporaryDirectory.appending(path: "\(UUID()).safetensors")
    try content.write(to: file)
    #expect(throws: (any Error).self) { try adapterArrays(file) }
}
