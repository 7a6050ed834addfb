// franz-go on a gateway: an idempotent producer with each compression, a group, committed offsets, no transactions.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

const each = 40

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 150*time.Second)
	defer cancel()
	servers, topic := os.Args[1], os.Args[2]
	codecs := []kgo.CompressionCodec{
		kgo.NoCompression(), kgo.GzipCompression(), kgo.SnappyCompression(), kgo.Lz4Compression(), kgo.ZstdCompression(),
	}
	sent := map[string]bool{}
	for number, codec := range codecs {
		producer := client(servers, kgo.DefaultProduceTopic(topic), kgo.AllowAutoTopicCreation(),
			kgo.ProducerBatchCompression(codec))
		var records []*kgo.Record
		for at := 0; at < each; at++ {
			value := fmt.Sprintf("%d-%d", number, at)
			sent[value] = true
			header := kgo.RecordHeader{Key: "codec", Value: []byte{byte(number)}}
			records = append(records, &kgo.Record{Key: []byte(value), Value: []byte(value), Headers: []kgo.RecordHeader{header}})
		}
		check(producer.ProduceSync(ctx, records...).FirstErr())
		producer.Close()
	}
	fmt.Println("sent", len(sent))

	half := len(sent) / 2
	first := read(ctx, servers, topic, sent, half)
	fmt.Println("read", first+read(ctx, servers, topic, sent, half), "left", len(sent))

	transactional := client(servers, kgo.TransactionalID("mine"), kgo.DefaultProduceTopic(topic))
	err := transactional.BeginTransaction()
	if err == nil {
		err = transactional.ProduceSync(ctx, kgo.StringRecord("never")).FirstErr()
	}
	fmt.Println("transactions refused", errors.Is(err, kerr.TransactionalIDAuthorizationFailed))
	fmt.Fprintln(os.Stderr, err)
	transactional.CloseAllowingRebalance()
}

// read takes as many records of a group as are wanted, each of them once, and commits them.
func read(ctx context.Context, servers, topic string, left map[string]bool, wanted int) int {
	member := client(servers, kgo.ConsumerGroup("franz"), kgo.ConsumeTopics(topic), kgo.DisableAutoCommit(),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	defer member.Close()
	found := 0
	for found < wanted {
		fetches := member.PollRecords(ctx, wanted-found)
		check(fetches.Err())
		for _, record := range fetches.Records() {
			value := string(record.Value)
			if !left[value] || string(record.Key) != value || len(record.Headers) != 1 {
				check(fmt.Errorf("%q was not sent like this, or was read before", value))
			}
			delete(left, value)
			found++
			check(member.CommitRecords(ctx, record))
		}
	}
	return found
}

func client(servers string, options ...kgo.Opt) *kgo.Client {
	made, err := kgo.NewClient(append(options, kgo.SeedBrokers(servers), kgo.RetryTimeout(20*time.Second))...)
	check(err)
	return made
}

func check(err error) {
	if err != nil {
		fmt.Println("failed:", err)
		os.Exit(1)
	}
}
