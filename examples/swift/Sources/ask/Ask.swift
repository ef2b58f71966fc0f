import AFMBundle
import Foundation

/// ask BUNDLE PROMPT [ADAPTER]: an answer, an event out of the prompt, and the adapter's answer.
@main
struct Ask {
    static func main() async throws {
        let arguments = CommandLine.arguments
        guard (3...4).contains(arguments.count) else {
            print("usage: ask BUNDLE PROMPT [ADAPTER]")
            exit(2)
        }
        let (bundle, prompt) = (URL(filePath: arguments[1], directoryHint: .isDirectory), arguments[2])
        let answers = try await Answers(bundle: bundle)
        try await answers.stream(prompt) { print($0, terminator: "") }
        let event = try await answers.event(in: prompt)
        print("\n\(event.day): \(event.title)")
        if arguments.count == 4 {
            let file = bundle.appending(path: "adapters/\(arguments[3]).safetensors")
            print(try await AdaptedAnswers(bundle: bundle).answer(prompt, adapter: adapterArrays(file)))
        }
    }
}
